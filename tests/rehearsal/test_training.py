"""megatron-core on the stand-in: engine, optimizer, checkpoints, resuming, without NCCL."""

from typing import Any

import pytest

from tests.runs import make_run, python
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics
from train.run.optimization import CosinePhase, ScheduleConfig
from train.run.probe import ProbeConfig

FIGURES = ("loss", "z_loss", "grad_norm", "held_out_loss")
SHORT: dict[str, Any] = {
    "total_steps": 3,
    "save_steps": (0, 2, 3),
    "evaluate_every_steps": 2,
    "probe": ProbeConfig(every_steps=2, sequences=4, group_size=16),
    "schedule": ScheduleConfig(warmup_tokens=256, phase=CosinePhase(horizon_tokens=100 * 256)),
}


def figures(directory):
    rows = read_metrics(RunDirectory(directory).metrics)
    return [
        {name: row[name] for name in row if name in FIGURES or name.startswith("quantization/")}
        for row in rows
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_on_a_gpu_has_the_losses_of_one_on_the_cpu(tmp_path, inputs, precision):
    for device in ("cpu", "gpu"):
        make_run(tmp_path / device, **inputs, **SHORT, precision=precision)
        done = python("tests.rehearsal.training", device, str(tmp_path / device))
        assert done.returncode == 0, done.stderr[-3000:]
    assert len(figures(tmp_path / "gpu")) == 4
    assert figures(tmp_path / "gpu") == figures(tmp_path / "cpu")


def test_a_tensor_left_on_the_cpu_is_found(tmp_path, inputs):
    make_run(tmp_path / "run", **inputs, **SHORT)
    left = "train/data/batches.py Batch.microbatches"
    done = python("tests.rehearsal.training", "gpu", str(tmp_path / "run"), left)
    assert done.returncode != 0
    assert "MixedDevicesError" in done.stderr
