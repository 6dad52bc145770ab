"""The verbs of the megatron engine on real ranks: rejected steps, decay, snapshots, slots."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from base.files import sha256_of
from tests.ckpt_tools.checkpoints import read_shards
from tests.runs import draw_weights, make_run, on_ranks
from train.data.batches import Batch
from train.distributed import gathered, start
from train.engine import Engine, StepResult
from train.optimizers.adamw import AdamW
from train.run.config import load_run
from train.run.optimization import Lawa

DRAWN = torch.Generator().manual_seed(5)
BATCHES = [torch.randint(0, 320, (8, 33), generator=DRAWN) for _ in range(6)]
RATE, DECAY = 1e-2, 0.1


class Rank:
    """One rank of an engine, its directory for snapshots, and the calls that the worker repeats."""

    def __init__(self, run_dir: str, out: str) -> None:
        from train.megatron.engine import MegatronEngine

        run, self.out = load_run(Path(run_dir) / "run.json"), Path(out)
        self.engine = MegatronEngine(run, start())
        draw_weights(self.engine, run)

    def snapshot(self, name: str, *, weights_only: bool = False):
        if dist.get_rank() == 0:
            (self.out / name).mkdir()
        dist.barrier()
        return self.engine.snapshot(self.out / name, weights_only=weights_only)

    def finish(self, name: str, snapshot) -> None:
        """Written in a thread; the names that the ranks return are those of the files."""
        names: list[str] = []
        thread = threading.Thread(target=lambda: names.extend(snapshot.write()))
        thread.start()
        thread.join()
        dist.barrier()
        names += snapshot.seal()
        everywhere = [name for rank_names in gathered(names) for name in rank_names]
        assert sorted(everywhere) == sorted(path.name for path in (self.out / name).iterdir())

    def save(self, name: str, **settings) -> None:
        self.finish(name, self.snapshot(name, **settings))

    def steps(self, *indices: int, accept=lambda _: True):
        batches = [Batch.of(BATCHES[index]).of_replica(self.engine.replica) for index in indices]
        return [self.engine.train_step(batch, RATE, accept) for batch in batches]

    def slots(self):
        """Every slot with its factor of the weights, and the shards of both."""
        for factor, name in enumerate(("lawa2x1.0", "lawa2x1.1"), start=2):
            for weights, tensor in zip(self.engine.weights(), self.engine.slot(name), strict=True):
                yield factor, weights, tensor


def use_engine(run_dir: str, elsewhere: str, out: str) -> None:
    """Worker, on every rank: writes a snapshot at every point that the test compares.

    The run directory `elsewhere` is of the same run at another layout.
    """

    rank = Rank(run_dir, out)
    engine = rank.engine
    assert not any(tensor.any() for _, _, tensor in rank.slots())
    nothing = Batch(BATCHES[0], torch.zeros(8, 32, dtype=torch.bool)).of_replica(engine.replica)
    rank.save("start")
    assert engine.evaluate(nothing) == 0
    assert engine.train_step(nothing, RATE, lambda _: True)[:2] == (0, 0)
    rank.save("only decayed", weights_only=True)

    rank.steps(0)
    rank.save("fork")
    kept = rank.snapshot("kept")
    rank.steps(1, 2, 3)
    rank.finish("kept", kept)
    rank.save("never seen")

    engine.load(Path(out) / "fork")
    (rejected,) = rank.steps(4, accept=lambda _: False)
    assert rejected.grad_norm > 0
    before = [weights.clone() for weights in engine.weights()]
    for weights in engine.weights():
        weights.mul_(1e20)  # products of these overflow
    engine.publish_weights()
    (overflowed,) = rank.steps(5, accept=StepResult.is_finite)
    assert not overflowed.is_finite()
    for weights, kept_weights in zip(engine.weights(), before, strict=True):
        weights.copy_(kept_weights)
    engine.publish_weights()
    rank.save("rejected")
    rank.steps(1, 2, 3)
    rank.save("seen")

    for factor, weights, tensor in rank.slots():
        tensor.copy_(weights * factor)
    rank.save("slots")
    with norms_with_extra_state():
        engine.load(Path(out) / "slots")
        rank.save("by the other kernels")
    engine.load(Path(out) / "by the other kernels")
    rank.save("slots again")
    assert layers_in_fp8(engine, lambda: engine.evaluate(nothing)) > 0
    assert layers_in_fp8(engine, lambda: engine.probe(BATCHES[0][:2, :-1])) == 0
    reload_slots(elsewhere, out).close()


@contextmanager
def norms_with_extra_state() -> Iterator[None]:
    """Norms with an empty extra state in their state dicts, as Transformer Engine's have it."""
    from train.megatron.layers import RMSNorm

    state: dict[str, Any] = {
        "get_extra_state": lambda _: torch.empty(0, dtype=torch.uint8),
        "set_extra_state": lambda _, __: None,
    }
    with mock.patch.multiple(RMSNorm, **state):
        yield


def layers_in_fp8(engine, call: Callable[[], object]) -> int:
    """The layers that mcore would compute in fp8 during a call, if Transformer Engine were here."""
    context = "megatron.core.transformer.transformer_block.get_fp8_context"
    config = engine._pipeline.model.config
    config.fp8, config.fp8_recipe = "hybrid", "tensorwise"
    with mock.patch(context, return_value=nullcontext()) as entered:
        call()
    assert config.fp8 == "hybrid"
    config.fp8 = None
    return entered.call_count


def reload_slots(run_dir: str, out: str) -> Engine:
    """Load the slots at another layout: they are still twice and thrice the weights."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    rank = Rank(run_dir, out)
    rank.engine.load(rank.out / "slots")
    for factor, weights, tensor in rank.slots():
        assert weights.any()
        assert torch.equal(tensor, weights * factor)
    return rank.engine


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in sorted(directory.glob("*.distcp"))}


@pytest.mark.parametrize(
    "settings",
    [{}, {"tensor": 2, "precision": "bf16"}],
    ids=["data parallel, fp32", "tensor parallel, bf16"],
)
def test_verbs(tmp_path, inputs, settings):
    optimizer = AdamW(peak_lr=RATE, weight_decay=DECAY, undecayed=("norm", "lm_head"))
    averages = (Lawa(interval_steps=1, window=2),)
    settings |= {"optimizer": optimizer, "averages": averages}
    run = make_run(tmp_path / "run", **inputs, **settings)
    make_run(tmp_path / "elsewhere", **inputs, **settings | {"tensor": 1, "pipeline": 2})
    on_ranks(2, use_engine, tmp_path / "run", tmp_path / "elsewhere", tmp_path)

    # A rejected or overflowed step leaves no trace, neither at once nor later.
    assert hashes(tmp_path / "rejected") == hashes(tmp_path / "fork")
    assert hashes(tmp_path / "seen") == hashes(tmp_path / "never seen") != hashes(tmp_path / "fork")
    # Nothing of the other kernels' states is in a checkpoint, and nothing is missed.
    assert hashes(tmp_path / "slots") == hashes(tmp_path / "by the other kernels")
    assert hashes(tmp_path / "slots") == hashes(tmp_path / "slots again")
    # What is written three steps later is what was there when the snapshot was made.
    assert hashes(tmp_path / "kept") == hashes(tmp_path / "fork")

    # Where no label counts there is no gradient: an update of AdamW multiplies by 1 - rate x decay
    # what is decayed.
    before, after = (read_shards(tmp_path / name, run.model) for name in ("start", "only decayed"))
    rounding = 1e-6 if run.precision == "fp32" else 8e-3
    for name, weight in before.items():
        spared = "norm" in name or "lm_head" in name
        expected = weight.float() * (1 if spared else 1 - RATE * DECAY)
        assert torch.allclose(
            after[name].float(), expected, rtol=0 if spared else rounding, atol=0
        ), name
