"""A checkpoint that an older stack wrote is read bit for bit, by training and by `ckpt_tools`.

checkpoint_of_megatron_core_0.16.tar.xz was written at two tensor-parallel ranks by Python 3.11,
torch 2.13 and megatron-core 0.16.1, of the run below: after `engine.start_from(weight)` the other
tensors of every parameter were set to FACTORS times the weight, and the count of steps to 7.
"""

import shutil
import zlib
from pathlib import Path

import torch
from torch import Tensor

from tests.ckpt_tools.checkpoints import read_shards
from tests.runs import make_run, on_ranks, save
from train.distributed import start
from train.model.config import ModelConfig, parameter_shapes
from train.run.config import load_run
from train.run.optimization import Ema

RECORDED = Path(__file__).with_name("checkpoint_of_megatron_core_0.16.tar.xz")
FACTORS = {"param": 1, "exp_avg": 2, "exp_avg_sq": 3, "slot.ema0.5x1.0": 4}
MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)


def weight(name: str) -> Tensor:
    """Numbers that differ from neighbour to neighbour and from name to name, exact in fp32."""
    shape = torch.Size(parameter_shapes(MODEL)[name])
    counted = torch.arange(shape.numel()) + zlib.crc32(name.encode())
    return (counted % 61 / 8 - 4).view(shape)


def load(run_dir: str, checkpoint: str, out: str) -> None:
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
    on_ranks(1, load, tmp_path / "run", recorded, again)
    for directory in (recorded, again):
        weights = read_shards(directory, MODEL)
        assert weights.keys() == parameter_shapes(MODEL).keys()
        assert all(torch.equal(weights[name], weight(name)) for name in weights)
