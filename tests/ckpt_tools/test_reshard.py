"""A trained checkpoint at another layout: the same bits saved, the same losses trained."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.ckpt_tools.checkpoints import read_shards
from tests.conftest import LAYOUTS
from tests.runs import on_ranks, ranks, succeed
from train.run.config import load_run
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics


def load_and_save(run_dir: str, checkpoint: str, out: str) -> None:
    """Worker, on every rank: loads the checkpoint into an engine of the run and saves it."""
    from train.distributed import start
    from train.megatron.engine import MegatronEngine

    engine = MegatronEngine(load_run(Path(run_dir) / "run.json"), start())
    engine.load(Path(checkpoint))
    snapshot = engine.snapshot(Path(out), weights_only=False)  # optimizer state too
    snapshot.write()
    snapshot.seal()
    engine.close()


@pytest.mark.parametrize(
    ("source", "layout"),
    [
        ("tp2", "dp2"),
        pytest.param("dp1", "tp2dp2", marks=pytest.mark.stress),
        ("pp2", "sp2"),
        ("gqa-dp1", "gqa-tp2"),
    ],
)
def test_trained_weights_survive_another_layout_bit_for_bit(trained, tmp_path, source, layout):
    """After ten steps no norm weight is 1: a permuted or duplicated shard of q- or k-norm would
    show.

    The optimizer's state comes back too: loaded once more at the layout it came from, every file is
    the same.
    """
    checkpoint = trained(source) / "checkpoints" / "step00000010"
    for name, start, at in (("there", checkpoint, layout), ("back", tmp_path / "there", source)):
        (tmp_path / name).mkdir()
        on_ranks(LAYOUTS[at][0], load_and_save, trained(at), start, tmp_path / name)
    model = load_run(trained(source) / "run.json").model
    before, after = read_shards(checkpoint, model), read_shards(tmp_path / "there", model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    norms = [weight for name, weight in before.items() if "norm" in name]
    assert all(weight.unique().numel() > 1 for weight in norms)
    files = sorted(path.name for path in checkpoint.glob("*.distcp"))
    assert files == sorted(path.name for path in (tmp_path / "back").glob("*.distcp"))
    assert all(
        (checkpoint / name).read_bytes() == (tmp_path / "back" / name).read_bytes()
        for name in files
    )


@pytest.mark.parametrize(("source", "layout"), [("tp2pp2", "dp2"), ("dp2", "pp2")])
def test_a_run_resumed_at_another_layout_goes_on_with_the_same_losses(
    trained, tmp_path, source, layout
):
    """The trajectory is the source's; what the other layout rounds otherwise grows over ten
    steps, and over all twenty in a run that had this layout from the start.
    """
    directory, whole = RunDirectory(tmp_path / layout), RunDirectory(trained(source))
    directory.path.mkdir()
    shutil.copyfile(trained(layout) / "run.json", directory.run_json)
    shutil.copytree(whole.checkpoint(10), directory.checkpoint(10))
    succeed(ranks(LAYOUTS[layout][0], "train", "run", str(directory.path)))
    losses, expected, other = (
        {row["step"]: row["loss"] for row in read_metrics(run.metrics) if "loss" in row}
        for run in (directory, whole, RunDirectory(trained(layout)))
    )
    assert sorted(losses) == list(range(11, 21))
    assert losses == pytest.approx({step: expected[step] for step in losses}, abs=1e-5)
    assert losses == pytest.approx({step: other[step] for step in losses}, abs=1e-4)
