"""Both engines on one configuration, step by step."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs import make_run, ranks, succeed
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics
from train.run.optimization import Anneal, CosinePhase, ScheduleConfig
from train.run.parallel import ZeroConfig


@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.stress)])
def test_both_engines_are_the_same_run(tmp_path, inputs, steps):
    """fp32, two processes; sums in another order, which fifty updates do not amplify."""
    settings: dict[str, Any] = {
        "total_steps": steps,
        "save_steps": (steps,),
        "evaluate_every_steps": 5,
        "schedule": ScheduleConfig(
            warmup_tokens=4 * 256,
            phase=CosinePhase(horizon_tokens=100 * 256),
            anneal=Anneal(start_step=steps - 5),
        ),
        "peak_lr": 2e-3,
    }
    variants: dict[str, dict[str, Any]] = {
        "megatron": {},
        "zero1": {"engine": "deepspeed"},
        "zero2": {"engine": "deepspeed", "zero": ZeroConfig(stage=2)},
    }
    for name, changes in variants.items():
        make_run(tmp_path / name, **inputs, **settings, **changes)
        succeed(ranks(2, "train", "run", str(tmp_path / name)))
        status = json.loads(RunDirectory(tmp_path / name).status_json.read_text())
        assert (status["status"], status["step"]) == ("done", steps)
    expected = _rows(tmp_path / "megatron")
    for name in ("zero1", "zero2"):
        rows = _rows(tmp_path / name)
        assert rows.keys() == expected.keys()
        assert rows == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert rows != expected, "two engines that agree to the last bit would be one"


def _rows(run_dir: Path) -> dict[tuple[int, str], float]:
    kept = ("loss", "z_loss", "held_out_loss", "grad_norm", "learning_rate")
    rows = read_metrics(RunDirectory(run_dir).metrics)
    return {(row["step"], name): row[name] for row in rows for name in kept if name in row}
