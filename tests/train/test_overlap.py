"""Collectives beside computation change no number: the engine with and without, on real ranks."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from base.environment import is_rank_zero
from base.files import write_json
from tests.conftest import widths
from tests.runs import draw_weights, make_run, on_ranks, save
from train.data.batches import Batch
from train.distributed import start
from train.engine import Engine
from train.model.config import ModelConfig
from train.optimizers.adamw import AdamW
from train.perturbing import train_step_of
from train.run.config import load_run
from train.run.optimization import Lawa
from train.run.perturbation import Qat

DRAWN = torch.Generator().manual_seed(5)
BATCHES = [torch.randint(0, 320, (8, 33), generator=DRAWN) for _ in range(4)]
PERTURBED_STEP = 10
# A bucket for every matrix.
OVERLAPPED: dict[str, Any] = {"overlaps": lambda _: True, "BUCKET_ELEMENTS": 2000}


class Rank:
    """One rank of an engine, which keeps the figures of what it does."""

    def __init__(self, run_dir: Path, mode: str) -> None:
        from train.megatron.engine import MegatronEngine

        run, self.out = load_run(run_dir / "run.json"), run_dir / mode
        self.engine = MegatronEngine(run, start())
        self.figures: list[Any] = []
        draw_weights(self.engine, run)

    def step(
        self,
        index: int,
        *,
        accepted: bool = True,
        observed: bool = False,
        perturbed: bool = False,
    ) -> None:
        def accept(_: object) -> bool:
            if observed:  # as `train.observing` does
                self.engine.weights()
            return accepted

        number = PERTURBED_STEP if perturbed else 1
        train_step = train_step_of(self.engine.run, self.engine, number)
        self.figures.append(train_step(self.batch(index), 1e-2, accept).figures)

    def evaluate(self) -> None:
        self.figures.append(self.engine.evaluate(self.batch(3)))

    def batch(self, index: int):
        return Batch.of(BATCHES[index]).of_replica(self.engine.replica)

    def save(self, name: str) -> None:
        save(self.engine, self.out / name)

    def average(self) -> None:
        """Evaluate with other weights, right after an update, and return to the own."""
        weights = self.engine.weights()
        saved = [shard.clone() for shard in weights]
        for shard in weights:
            shard.mul_(0.5)
        self.engine.publish_weights()
        self.evaluate()
        for shard, kept in zip(weights, saved, strict=True):
            shard.copy_(kept)
        self.engine.publish_weights()


def use_both(run_dir: str) -> None:
    """Worker, on every rank: the engine with overlap, then without."""
    from megatron.core import parallel_state
    from megatron.core.distributed import param_and_grad_buffer

    reduce_scatter = param_and_grad_buffer.dist_reduce_scatter_func

    def average(shard: torch.Tensor, buffer: torch.Tensor, *, op: Any, group: Any, **named: Any):
        """Do what NCCL does, and gloo cannot: divide by the ranks."""
        assert op == dist.ReduceOp.AVG
        buffer.div_(group.size())
        return reduce_scatter(shard, buffer, op=dist.ReduceOp.SUM, group=group, **named)

    averaged = OVERLAPPED | {"averages": lambda _: True}
    with (
        mock.patch.multiple("train.megatron.data_parallel", **averaged),
        mock.patch.object(param_and_grad_buffer, "dist_reduce_scatter_func", average),
    ):
        use_engine(Path(run_dir), "overlapped")
    parallel_state.destroy_model_parallel()
    use_engine(Path(run_dir), "plain").close()


def use_engine(run_dir: Path, mode: str) -> Engine:
    """Do whatever reads or writes weights, each right after an update."""
    rank = Rank(run_dir, mode)
    rank.step(0)
    if mode == "overlapped":
        buckets = rank.engine._pipeline.model.bucket_groups
        assert len(buckets) > 4
        assert buckets[-1].param_gather_handle  # in flight
        assert not buckets[0].param_gather_dispatched
    else:
        assert not rank.engine._pipeline.model.overlaps
    rank.save("fork")
    rank.step(1)
    rank.evaluate()
    rank.step(2)
    rank.step(3, accepted=False)
    rank.evaluate()
    rank.step(0, observed=True)
    rank.step(3)
    rank.step(1)
    rank.average()
    rank.step(2)
    logits = rank.engine.probe(BATCHES[0][:2, :-1]).get("logits")
    rank.figures.append([] if logits is None else logits.tolist())

    # Right after an update, whose weights have to be gathered before they are rounded.
    rank.step(3, perturbed=True)
    rank.step(0, perturbed=True, accepted=False)
    rank.step(1, perturbed=True, observed=True)
    rank.evaluate()

    rank.step(0)
    rank.engine.load(rank.out / "fork")
    rank.step(1)
    rank.evaluate()
    rank.save("resumed")
    if mode == "plain":
        equals_overlapped(rank)
    if is_rank_zero():
        write_json(rank.out / "figures.json", rank.figures)
    return rank.engine


def equals_overlapped(rank: Rank) -> None:
    """Weights and moments are those that the engine of the other mode saved."""
    state = rank.engine._state
    tensors = [
        tensor.clone() for piece in state.pieces for tensor in state._tensors(piece).values()
    ]
    rank.engine.load(rank.out.parent / "overlapped" / "resumed")
    others = [tensor for piece in state.pieces for tensor in state._tensors(piece).values()]
    assert len(tensors) == 5 * len(state.pieces)  # and two slots
    assert all(map(torch.equal, tensors, others))


@pytest.mark.parametrize(
    ("processes", "pipeline", "tied"),
    [
        (4, 2, False),
        pytest.param(2, 1, False, marks=pytest.mark.stress),
        pytest.param(4, 2, True, marks=pytest.mark.stress),
        pytest.param(2, 1, True, marks=pytest.mark.stress),
    ],
)
def test_overlap_changes_nothing(tmp_path, inputs, processes, pipeline, tied):
    """Bit for bit: two ranks' gradients have one sum, and nothing is clipped.

    The norm, which is summed by buckets, may differ in its last bits.
    """
    settings: dict[str, Any] = {
        "micro_batch_size": 2,
        "optimizer": AdamW(peak_lr=1e-2, clip_grad_norm=1e6),
        "averages": (Lawa(interval_steps=1, window=2),),
        "perturbation": Qat(spec="rtn-b3-g8", from_step=PERTURBED_STEP),
    }
    model = ModelConfig(
        **widths(32, 64, 4, 4, vocab_size=320, num_hidden_layers=4), tie_word_embeddings=tied
    )
    make_run(tmp_path, **inputs, **settings, model=model, pipeline=pipeline)
    figures = {}
    on_ranks(processes, use_both, tmp_path)
    for mode in ("overlapped", "plain"):
        figures[mode] = json.loads((tmp_path / mode / "figures.json").read_text())
    norms = {
        mode: [row.pop("grad_norm") for row in rows if isinstance(row, dict)]
        for mode, rows in figures.items()
    }
    assert figures["overlapped"] == figures["plain"]
    assert norms["overlapped"] == pytest.approx(norms["plain"], rel=1e-6)
