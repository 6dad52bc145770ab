"""Checkpoints of megatron that are loaded: by each rank its part, and of an older stack."""

import contextlib
import json
import math
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ckpt_tools.checkpoints import read_shards, read_weights
from tests.conftest import widths
from tests.runs import make_run, on_ranks, save
from train.distributed import start
from train.engines import build_engine
from train.model.config import ModelConfig, parameter_shapes
from train.run.config import load_run
from train.run.directory import RunDirectory
from train.run.optimization import Ema

KINDS = 3  # main weights and two moments, in fp32


@contextlib.contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Yield the bytes of every read of numbers from a checkpoint within the block."""
    counts: list[int] = []

    def counted(path, dtype, count, offset):
        counts.append(count)
        return np.fromfile(path, dtype, count, offset=offset)

    with mock.patch("train.megatron.shards.np", SimpleNamespace(fromfile=counted, uint8=np.uint8)):
        yield counts


def load(run_dir: str, step: str, out: str) -> None:
    """Worker, on every rank: OUT/RANK.json has the bytes of numbers that it reads.

    OUT/weights is a checkpoint of the weights that all compute with then.
    """
    directory = RunDirectory(Path(run_dir))
    engine = build_engine(load_run(directory.run_json), start())
    with counted_reads() as counts:
        engine.load(directory.checkpoint(int(step)))
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(sum(counts)))
    save(engine, Path(out) / "weights", weights_only=True)
    engine.close()


def test_a_rank_loads_its_own_rows_and_derives_the_model(trained, tmp_path):
    """The weights in bf16 are the rounded main weights, bit for bit: nobody reads them.

    Both ranks together read every value once, each half of them: the stretches are equal, but for
    the padding of 64 elements at most that mcore puts before a parameter.
    """
    directory, processes = RunDirectory(trained("bf16-dp2")), 2
    on_ranks(processes, load, directory.path, 20, tmp_path)
    model = load_run(directory.run_json).model
    shapes = parameter_shapes(model).values()
    state = KINDS * 4 * sum(map(math.prod, shapes))
    padding = KINDS * 4 * 64 * len(shapes)
    loaded = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    assert sum(loaded) == state
    assert max(loaded) <= state / processes + padding
    saved, derived = (
        read_weights(directory.checkpoint(20)),
        read_shards(tmp_path / "weights", model),
    )
    assert saved.keys() == derived.keys()
    assert all(saved[name].equal(derived[name]) for name in saved)


# Written at two tensor-parallel ranks by Python 3.11, torch 2.13 and megatron-core 0.16.1, of the run
# in the test: after `engine.start_from(weight)` the other tensors of every parameter were set to
# FACTORS times the weight, and the count of steps to 7.
RECORDED = Path(__file__).with_name("checkpoint_of_megatron_core_0.16.tar.xz")
FACTORS = {"param": 1, "exp_avg": 2, "exp_avg_sq": 3, "slot.ema0.5x1.0": 4}
MODEL = ModelConfig(**widths(16, 16, 2, 2, vocab_size=32, num_hidden_layers=1))


def weight(name: str) -> Tensor:
    """Numbers that differ from neighbour to neighbour and from name to name, exact in fp32."""
    shape = torch.Size(parameter_shapes(MODEL)[name])
    counted = torch.arange(shape.numel()) + zlib.crc32(name.encode())
    return (counted % 61 / 8 - 4).view(shape)


def load_older(run_dir: str, checkpoint: str, out: str) -> None:
    """Worker: loads the checkpoint, looks at everything and saves it again."""
    from train.megatron.engine import MegatronEngine

    engine = MegatronEngine(load_run(Path(run_dir) / "run.json"), start())
    engine.load(Path(checkpoint))
    assert engine._state.inner_optimizer.steps == 7
    for piece in engine._state.pieces:
        tensors = engine._state._tensors(piece)
        assert tensors.keys() == FACTORS.keys()
        assert all(torch.equal(tensors[key], n * tensors["param"]) for key, n in FACTORS.items())
    save(engine, Path(out), weights_only=True)
    engine.close()


def test_a_checkpoint_of_megatron_core_0_16_is_read_bit_for_bit(tmp_path, inputs):
    recorded, again = tmp_path / "recorded", tmp_path / "again"
    shutil.unpack_archive(RECORDED, recorded, filter="data")
    average = Ema(decay=0.5, interval_steps=1)
    make_run(tmp_path / "run", **inputs, model=MODEL, averages=(average,))
    on_ranks(1, load_older, tmp_path / "run", recorded, again)
    for directory in (recorded, again):
        weights = read_shards(directory, MODEL)
        assert weights.keys() == parameter_shapes(MODEL).keys()
        assert all(torch.equal(weights[name], weight(name)) for name in weights)
