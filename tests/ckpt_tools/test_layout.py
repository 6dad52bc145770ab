"""Names and layouts of the megatron model, against loops that say where every row goes."""

import pytest
import torch

from tests.conftest import make_hf_directory, widths
from tests.megatron_tensors import to_hf
from train.model import megatron_names
from train.model.config import ModelConfig

SHAPE = widths(16, 12, 8, 4, vocab_size=24, num_hidden_layers=3)
MODEL = ModelConfig(**SHAPE)


def hf_weights(tmp_path):
    from safetensors.torch import load_file

    directory = make_hf_directory(tmp_path / "hf", **SHAPE)
    return load_file(directory / "model.safetensors")


def test_every_hf_key_is_used_exactly_once_and_comes_back(tmp_path):
    weights = hf_weights(tmp_path)
    used = [
        name
        for megatron in megatron_names.megatron_names(3)
        for name in megatron_names.hf_names(megatron)
    ]
    assert sorted(used) == sorted(weights)
    back: dict[str, torch.Tensor] = {}
    for name in megatron_names.megatron_names(3):
        back |= to_hf(name, megatron_names.from_hf(name, weights.__getitem__, MODEL), MODEL)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_queries_keys_and_values_are_interleaved_per_group(tmp_path):
    weights = hf_weights(tmp_path)
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    query, key, value = (weights[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv")
    rows = []
    for group in range(4):  # two query heads of two rows each, one key head, one value head
        rows += [query[4 * group + row] for row in range(4)]
        rows += [key[2 * group + row] for row in range(2)]
        rows += [value[2 * group + row] for row in range(2)]
    assert torch.equal(megatron_names.from_hf(name, weights.__getitem__, MODEL), torch.stack(rows))


def test_a_rank_holds_its_gate_rows_then_its_up_rows(tmp_path):
    weights = hf_weights(tmp_path)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    gate, up = (weights[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    whole = megatron_names.from_hf(name, weights.__getitem__, MODEL)
    assert torch.equal(megatron_names.shard(name, whole, 1, 2), torch.stack([*gate[6:], *up[6:]]))


@pytest.mark.parametrize(
    ("suffix", "axis"),
    [("linear_proj.weight", 1), ("q_layernorm.weight", 0), ("linear_proj.post_norm.weight", None)],
)
def test_shards_together_are_the_whole(tmp_path, suffix, axis):
    weights = hf_weights(tmp_path)
    name = f"decoder.layers.2.self_attention.{suffix}"
    whole = megatron_names.from_hf(name, weights.__getitem__, MODEL)
    parts = [megatron_names.shard(name, whole, rank, 2) for rank in range(2)]
    assert megatron_names.shard_axis(name) == axis
    expected = parts[0] if axis is None else torch.cat(parts, dim=axis)
    assert torch.equal(expected, whole)


def test_an_unknown_name_raises():
    with pytest.raises(KeyError):
        megatron_names.hf_names("decoder.layers.0.self_attention.linear_q.weight")
