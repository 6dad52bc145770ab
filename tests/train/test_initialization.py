"""Initial weights: their distribution, and what they do not depend on."""

import hashlib

import numpy as np
import pytest
import torch
from scipy import special, stats

from tests.conftest import widths
from train.model.config import ModelConfig
from train.model.initialization import CHUNK, draw_normal, initial_parameter

MODEL = ModelConfig(**widths(64, 96, 4, 4, vocab_size=320, num_hidden_layers=1))
KEY, COUNT = 11, 6 * CHUNK + 5


def drawn(cut_at: float | None, count: int = COUNT) -> torch.Tensor:
    weights = torch.empty(count)
    draw_normal(weights, KEY, std=1.0, cut_at=cut_at)
    return weights


@pytest.mark.parametrize("cut_at", [None, 3.0])
def test_weights_are_quantiles_of_counted_random_bits(cut_at):
    """By scipy in float64, of the bits of one chunk after the other: to the rounding of fp32."""
    chunks = [
        np.random.Philox(key=KEY, counter=chunk << 64).random_raw(CHUNK // 2).view(np.uint32)
        for chunk in range(7)
    ]
    bits = np.concatenate(chunks)[:COUNT]
    lowest = stats.norm.cdf(-cut_at) if cut_at else 0.0
    beyond = lowest + (0.5 - lowest) * ((bits & 0x7FFFFFFF) + 0.5) / 2**31
    expected = np.where(bits >> 31, special.ndtri(beyond), -special.ndtri(beyond))
    assert np.abs(drawn(cut_at).numpy() - expected).max() < 5e-7


def test_weights_do_not_depend_on_threads_or_on_what_follows(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")  # a rank's share is one core
    alone = drawn(3.0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert torch.equal(drawn(3.0), alone)
    assert torch.equal(drawn(3.0, COUNT - CHUNK), alone[: COUNT - CHUNK])


@pytest.mark.parametrize(
    ("initializer", "digest"),
    [("truncated_normal", "0c9b096f7dea13cb"), ("normal", "2973d4801e8ef39a")],
)
def test_weights_are_those_of_every_version(initializer, digest):
    """Recorded bytes: a library that draws or rounds otherwise would change every run."""
    model = MODEL.model_copy(update={"initializer": initializer})
    weight = initial_parameter("model.layers.0.mlp.down_proj.weight", model, seed=6198)
    assert hashlib.sha256(weight.numpy().tobytes()).hexdigest()[:16] == digest


def test_parameters_differ_by_name_and_seed():
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    weights = [initial_parameter(name, MODEL, seed) for name in names for seed in (1, 2)]
    correlations = np.corrcoef([weight.numpy().ravel() for weight in weights])
    assert np.abs(correlations - np.eye(6)).max() < 5 / 64  # 4,096 weights each
    assert all(weight.std().item() == pytest.approx(0.02, rel=0.05) for weight in weights)
    assert torch.equal(initial_parameter("model.norm.weight", MODEL, 1), torch.ones(64))
