"""A run whose first batches are smaller, in both engines: against torch, resumed and branched."""

from typing import Any

import pytest
import torch

from base.frozen import fingerprint
from tests.runs import make_run, ranks, succeed
from tests.train.plain import adamw, differentiate, plain_model, update
from tests.train.trajectories import copy_until, numbers, shard_hashes
from train.data.batches import batch
from train.data.corpus import open_corpus
from train.run.config import BranchFrom
from train.run.directory import RunDirectory
from train.run.optimization import ConstantPhase, ScheduleConfig, SmallerBatch

SIZES = [4, 4, 8, 8, 8, 12, 12, 12]
SETTINGS: dict[str, Any] = {
    "batch_warmup": (
        SmallerBatch(until_step=2, batch_size=4),
        SmallerBatch(until_step=5, batch_size=8),
    ),
    "batch_size": 12,
    "micro_batch_size": 2,
    "total_steps": 8,
    "save_steps": (4, 8),
    # The first five updates have 32 sequences of 32 tokens.
    "schedule": ScheduleConfig(warmup_tokens=32 * 32, phase=ConstantPhase()),
}
RATES = [1e-2 * share for share in (4 / 32, 8 / 32, 16 / 32, 24 / 32, 1, 1, 1, 1)]


def losses_by_hand(run) -> list[float]:
    """Torch's AdamW on consecutive pieces of one order of sequences."""
    model = plain_model(run)
    optimizer = adamw(dict(model.named_parameters()))
    corpus = open_corpus(run.data.train)
    rows = batch(corpus, step=1, batch_size=sum(SIZES), sequence_length=32, seed=run.seed)
    losses = []
    for tokens_BS, rate in zip(torch.from_numpy(rows).split(SIZES), RATES, strict=True):
        losses.append(differentiate(model, tokens_BS))
        update(optimizer, rate)
    return losses


@pytest.mark.parametrize(
    ("engine", "resumed"),
    [
        ("megatron", ("again", "branch")),
        ("deepspeed", ("again",)),
        pytest.param("deepspeed", ("branch",), marks=pytest.mark.stress),  # as megatron's
    ],
)
def test_smaller_batches_first(tmp_path, inputs, engine, resumed):
    whole = RunDirectory(tmp_path / "run")
    run = make_run(whole.path, **inputs, engine=engine, **SETTINGS)
    succeed(ranks(2, "train", "run", str(whole.path)))
    rows = [row for row in numbers(whole.path) if "loss" in row]
    assert [row["learning_rate"] for row in rows] == pytest.approx(RATES)
    assert [row["tokens"] for row in rows] == [32 * sum(SIZES[:step]) for step in range(1, 9)]
    assert [row["loss"] for row in rows] == pytest.approx(losses_by_hand(run), abs=1e-4)

    # From the middle of a stage: resumed, and as a branch.
    copy_until(4, whole, tmp_path / "again")
    origin = BranchFrom(run="../run", step=4, fingerprint=fingerprint(run))
    settings = SETTINGS | {"branch_from": origin, "save_steps": (8,)}
    make_run(tmp_path / "branch", **inputs, engine=engine, **settings)
    for directory in (RunDirectory(tmp_path / name) for name in resumed):
        succeed(ranks(2, "train", "run", str(directory.path)))
        assert numbers(directory.path)[-4:] == rows[-4:]
        assert shard_hashes(directory.checkpoint(8)) == shard_hashes(whole.checkpoint(8))
