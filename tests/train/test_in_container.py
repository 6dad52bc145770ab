"""Training on a CPU where Transformer Engine is installed, as in a container on a login node."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import environment, make_run, python, succeed
from train.run.metrics import read_metrics

CONTAINER = Path(__file__).parent / "in_container"


@pytest.mark.stress
def test_a_training_on_a_cpu_is_the_same_where_transformer_engine_is_installed(tmp_path, inputs):
    for name in ("without", "with"):
        make_run(tmp_path / name, **inputs)
    assert python("train", "run", str(tmp_path / "without")).returncode == 0

    # a new interpreter: the one that tests fork has imported megatron-core without it
    variables = environment()
    variables["PYTHONPATH"] = f"{CONTAINER}:{variables['PYTHONPATH']}"
    command = [sys.executable, "-m", "train", "run", str(tmp_path / "with")]
    succeed(subprocess.run(command, env=variables, capture_output=True, text=True))

    losses = [
        [row.get("loss") for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("without", "with")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) >= 20
