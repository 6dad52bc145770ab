"""Both engines on one configuration, compared by the command that users have for it."""

import json
from typing import Any

from tests.runs import make_run, python, ranks
from train.run_directory import RunDirectory
from train.settings import ZeroConfig


def test_fifty_steps_of_both_engines_are_the_same_run(tmp_path, inputs):
    """fp32, two processes; sums are taken in another order, which fifty updates at this rate do not amplify."""
    settings: dict[str, Any] = {"total_steps": 50, "save_steps": (50,), "evaluate_every_steps": 25, "peak_lr": 3e-3}
    variants: dict[str, dict[str, Any]] = {
        "megatron": {},
        "zero1": {"engine": "deepspeed"},
        "zero2": {"engine": "deepspeed", "zero": ZeroConfig(stage=2)},
    }
    for name, changes in variants.items():
        make_run(tmp_path / name, **inputs, **settings, **changes)
        done = ranks(2, "train", "run", str(tmp_path / name))
        assert done.returncode == 0, done.stderr[-3000:]
        status = json.loads(RunDirectory(tmp_path / name).status_json.read_text())
        assert (status["status"], status["step"]) == ("done", 50)
    for name in ("zero1", "zero2"):
        pair = (str(tmp_path / "megatron"), str(tmp_path / name))
        compared = python("train", "compare", *pair, "--tolerance", "1e-4")
        assert compared.returncode == 0, compared.stdout
        assert "engine" in compared.stdout
        strict = python("train", "compare", *pair, "--tolerance", "0")
        assert strict.returncode == 1, "two engines that agree to the last bit would be one"
