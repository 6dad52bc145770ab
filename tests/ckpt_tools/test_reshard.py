"""One trained checkpoint loaded at another layout and saved again holds the same bits."""

import sys
from pathlib import Path

import pytest
import torch

from ckpt_tools.megatron_shards import read_hf_weights
from tests.conftest import LAYOUTS
from tests.runs import execute, torchrun
from train.config import load_run
from train.settings import ParallelConfig


def load_and_save(run_dir: str, checkpoint: str, tensor: str, pipeline: str, out: str) -> None:
    """Worker, on every rank: loads the checkpoint into an engine of the given layout and saves it."""
    from train.distributed import start
    from train.megatron.engine import MegatronEngine

    layout = ParallelConfig(tensor=int(tensor), pipeline=int(pipeline))
    run = load_run(Path(run_dir) / "run.json").model_copy(update={"parallel": layout})
    engine = MegatronEngine(run, start())
    engine.load(Path(checkpoint))
    snapshot = engine.snapshot(Path(out), weights_only=False)
    snapshot.write()
    snapshot.seal()
    engine.close()


@pytest.mark.parametrize(("source", "layout"), [("tp2", "dp2"), ("dp1", "tp2pp2"), ("gqa-dp1", "gqa-tp2")])
def test_trained_weights_survive_another_layout_bit_for_bit(trained, tmp_path, source, layout):
    """After ten steps no norm weight is 1: a permuted or duplicated shard of q- or k-norm would show."""
    processes, settings = LAYOUTS[layout]
    checkpoint = trained(source) / "checkpoints" / "step00000010"
    arguments = [str(trained(source)), str(checkpoint)]
    arguments += [str(settings.get(axis, 1)) for axis in ("tensor", "pipeline")]
    (tmp_path / "out").mkdir()
    done = execute(torchrun(processes, "tests.ckpt_tools.test_reshard", *arguments, str(tmp_path / "out")))
    assert done.returncode == 0, done.stderr[-3000:]
    model = load_run(trained(source) / "run.json").model
    before, after = read_hf_weights(checkpoint, model), read_hf_weights(tmp_path / "out", model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    norms = [weight for name, weight in before.items() if "norm" in name]
    assert all(weight.unique().numel() > 1 for weight in norms)


if __name__ == "__main__":
    load_and_save(*sys.argv[1:])
