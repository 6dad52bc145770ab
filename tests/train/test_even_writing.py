"""Every rank writes, copies and reads what it holds, with the buckets of GPUs.

On real ranks with buckets whose borders cut rows; of the sizes and numbers of ranks of clusters in
processes that simulate one rank each.
"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from base.environment import is_rank_zero
from base.files import write_json
from tests.runs import draw_weights, leave_layout, make_run, on_ranks, python, save, succeed
from tests.train.simulated import simulated_rank
from tests.train.test_loading import counted_reads
from tests.train.test_overlap import OVERLAPPED
from train.distributed import gathered, start
from train.model.config import ModelConfig
from train.model.presets import OLMO2_1B, OLMO2_7B, OLMO2_190M
from train.planning.memory import checkpoint_bytes, snapshot_bytes
from train.run.config import RunConfig, load_run
from train.run.optimization import Lawa
from train.run.saving import SavingConfig

# Several buckets on every stage, whose borders of ranks cut rows.
BUCKETS = OVERLAPPED | {"BUCKET_ELEMENTS": 61_000}
MODEL = ModelConfig(
    vocab_size=320,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
SAVING = SavingConfig(full_steps=(20,), restart_every_steps=5)
LAYOUTS: tuple[dict[str, Any], ...] = ({}, {"tensor": 2}, {"pipeline": 2})


def sizes_on_ranks(run_dir: str, *others: str) -> None:
    """Worker, on every rank: bytes that each writes and copies at a permanent step, and then reads.

    The same checkpoint is read at the layout of every run of `others`.
    """
    from train.megatron.engine import MegatronEngine

    run, root = load_run(Path(run_dir) / "run.json"), Path(run_dir)
    with mock.patch.multiple("train.megatron.data_parallel", **BUCKETS):
        engine = MegatronEngine(run, start())
        draw_weights(engine, run)
        assert len(engine._pipeline.model.bucket_groups) > 2
        live = {
            tensor.untyped_storage().data_ptr()
            for piece in engine._state.pieces
            for tensor in (piece.parameter, *engine._state._tensors(piece).values())
        }
        copied, sizes = engine._memory.copied, {}

        def copied_from_live(tensors):
            assert {tensor.untyped_storage().data_ptr() for tensor in tensors} <= live
            return copied(tensors)

        # As the loop does at a permanent step: an average, the restart checkpoint's state, weights.
        kinds = {"average": True, "full": False, "weights": True}
        with mock.patch.object(engine._memory, "copied", copied_from_live):
            for kind in kinds:
                (root / kind).mkdir(exist_ok=True)
            dist.barrier()
            snapshots = {
                kind: engine.snapshot(root / kind, weights_only=weights_only)
                for kind, weights_only in kinds.items()
            }
        for kind, snapshot in snapshots.items():
            names = snapshot.write()
            dist.barrier()
            snapshot.seal()
            sizes[f"writes {kind}"] = gathered(sum((root / kind / n).stat().st_size for n in names))
        # A second save takes no more memory.
        save(engine, root / "again")
        blocks = [len(block) for free in engine._memory._free.values() for block in free]
        sizes["host memory"] = gathered(sum(blocks))

        for other in others:
            leave_layout(run)
            run = load_run(Path(other) / "run.json")
            engine = MegatronEngine(run, start())
            with counted_reads() as counts:
                engine.load(root / "full")
            sizes[f"reads {Path(other).name}"] = gathered(sum(counts))
    if is_rank_zero():
        write_json(root / "sizes.json", sizes)
    engine.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_writes_copies_or_reads_more_than_its_share(tmp_path, inputs, layout):
    settings: dict[str, Any] = {"model": MODEL, "micro_batch_size": 2, "precision": "bf16"}
    settings |= {"saving": SAVING, "averages": (Lawa(interval_steps=5, window=2),)}
    run = make_run(tmp_path, **inputs, **settings, **layout)
    others = [tmp_path / f"other{index}" for index in range(len(LAYOUTS))]
    for other, changes in zip(others, LAYOUTS, strict=True):
        make_run(other, **inputs, **settings, **changes)
    on_ranks(4, sizes_on_ranks, tmp_path, *others)
    figures = json.loads((tmp_path / "sizes.json").read_text())

    for name, sizes in figures.items():
        # Of a row that tensor ranks cut, one that reads its end reads the beginning as well.
        most = 1.5 if name == "reads other1" and layout != {"tensor": 2} else 1.1
        assert max(sizes) <= most * sum(sizes) / len(sizes), name
    # The planner counts the fullest stage; every tensor of a block begins at 64 bytes.
    assert max(figures["host memory"]) <= 1.05 * snapshot_bytes(run, 4)
    state = checkpoint_bytes(run).full_each - checkpoint_bytes(run).weights_each
    for index, changes in enumerate(LAYOUTS):
        read = sum(figures[f"reads other{index}"])
        # Norms are on both tensor ranks, and each reads its own.
        assert state <= read <= state * (1.3 if changes == {"tensor": 2} else 1)


def count(out: str, *places: str) -> None:
    """Worker: bytes that single ranks of runs would write and copy, of RUN_DIR:RANK:RANKS."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    sizes = {}
    for place in places:
        run_dir, rank, ranks = place.split(":")
        with simulated_rank(load_run(Path(run_dir) / "run.json"), int(rank), int(ranks)) as engine:
            model = engine._model_state()
            weights = engine._state.weights_to_save(model)
            tensors = nested_values([engine._state.to_save(model), weights])
            sizes[place] = sum(tensor.data.nbytes for tensor in tensors)
    write_json(Path(out), sizes)


def check_shares(tmp_path: Path, model: ModelConfig, ranks: int) -> None:
    """A full save of a model by some of so many data-parallel ranks."""
    directory = tmp_path / f"run{ranks}"
    run: RunConfig = make_run(
        directory,
        model=model,
        precision="bf16",
        batch_size=4 * ranks,
        averages=(Lawa(interval_steps=500, window=5),),
        saving=SavingConfig(restart_every_steps=500),
    )
    places = [f"{directory}:{rank}:{ranks}" for rank in (0, ranks // 3, ranks - 1)]
    out = directory / "sizes.json"
    succeed(python("tests.worker", __name__, "count", str(out), *places))
    sizes = json.loads(out.read_text()).values()
    even = checkpoint_bytes(run).full_each / ranks
    # Padding at the ends of buckets is all that makes them unequal. The planner also counts the
    # weights of an average.
    assert 0.9 * even <= min(sizes) <= max(sizes) <= 1.1 * even
    assert max(sizes) <= 1.05 * snapshot_bytes(run, ranks)
    if (model, ranks) == (OLMO2_7B, 64):
        assert max(sizes) / 1e9 < 15  # seconds at 1 GB/s


def test_shares_of_the_1b_on_64_ranks(tmp_path):
    check_shares(tmp_path, OLMO2_1B, 64)


@pytest.mark.stress
@pytest.mark.parametrize("ranks", [8, 64, 512])
@pytest.mark.parametrize("model", [OLMO2_190M, OLMO2_1B, OLMO2_7B])
def test_shares(tmp_path, model, ranks):
    check_shares(tmp_path, model, ranks)
