"""Probes: signs that depend on seed, number, name and place, and on nothing else."""

import hashlib

import pytest
import torch

import curvature.products.probes
from curvature.products.parameters import Parameters, Probe
from curvature.products.probes import rademacher
from tests.curvature.conftest import tiny_model


def splitmix64_signs(name: str, count: int, *, seed: int, probe: int) -> list[int]:
    """The documented hash in Python's unbounded integers, state advanced one output at a time."""
    state = int.from_bytes(
        hashlib.blake2b(f"{seed}/{probe}/{name}".encode(), digest_size=8).digest(), "little"
    )
    signs: list[int] = []
    while len(signs) < count:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        z ^= z >> 31
        signs += [1 if z >> bit & 1 else -1 for bit in range(64)]
    return signs[:count]


@pytest.mark.parametrize("words_per_chunk", [1, 3, 1 << 12])
@pytest.mark.parametrize(("start", "stop"), [(0, 500), (64, 128), (100, 321), (191, 193), (5, 5)])
@pytest.mark.parametrize(("seed", "probe"), [(0, 0), (7, 31), (2**63 - 1, -1)])
def test_signs_follow_the_documented_hash_from_any_place(
    monkeypatch, seed, probe, start, stop, words_per_chunk
):
    """Results of different machines and years are comparable only while this holds."""
    monkeypatch.setattr(curvature.products.probes, "WORDS_PER_CHUNK", {"cpu": words_per_chunk})
    whole = splitmix64_signs("w", 500, seed=seed, probe=probe)
    assert rademacher("w", start, stop, seed=seed, probe=probe).tolist() == whole[start:stop]


def test_a_models_probe_joins_those_of_its_tensors_and_ignores_their_values():
    parameters, other = Parameters(tiny_model()), Parameters(tiny_model(torch.float32, std=0.1))
    v_p = parameters.probe(Probe(4, 9))
    for name, part in parameters.split(v_p).items():
        expected = rademacher(name, 0, part.numel(), seed=4, probe=9)
        assert torch.equal(part.flatten(), expected.double())
        assert torch.equal(parameters.signs(name, Probe(4, 9)), part)
    assert torch.equal(other.probe(Probe(4, 9)), v_p.float())


def test_a_probe_of_some_tensors_is_the_whole_one_with_zeros_elsewhere():
    parameters = Parameters(tiny_model())
    chosen = ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"]
    whole, some = (parameters.split(parameters.probe(Probe(1, 2, only))) for only in (None, chosen))
    for name, part in some.items():
        assert torch.equal(part, whole[name] if name in chosen else torch.zeros_like(part))
