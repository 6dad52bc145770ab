"""Probes: signs that depend on seed, number, name and place, and on nothing else."""

import hashlib
import itertools

import pytest
import torch

import curvature.products.probes
from curvature.products.parameters import Parameters, Probe
from curvature.products.probes import rademacher, words
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


@pytest.mark.parametrize(("seed", "probe"), [(0, 0), (7, 31), (2**63 - 1, -1)])
def test_signs_follow_the_documented_hash(seed, probe):
    name = "model.layers.0.mlp.up_proj.weight"
    assert rademacher(name, 0, 1000, seed=seed, probe=probe).tolist() == splitmix64_signs(
        name, 1000, seed=seed, probe=probe
    )


def splitmix64_words(key: str, count: int) -> list[int]:
    """The signed words, put together from the bits of the hash above."""
    seed, probe, name = key.split("/")
    signs = splitmix64_signs(name, 64 * count, seed=int(seed), probe=int(probe))
    numbers = [
        sum(1 << bit for bit in range(64) if signs[64 * word + bit] == 1) for word in range(count)
    ]
    return [number - 2**64 if number >= 2**63 else number for number in numbers]


@pytest.mark.parametrize(("start", "stop"), [(0, 20), (7, 20), (19, 20), (4, 4)])
def test_words_are_those_of_the_documented_hash_from_any_place(start, stop):
    assert (
        words("5/3/a.weight", start, stop).tolist()
        == splitmix64_words("5/3/a.weight", 20)[start:stop]
    )


@pytest.mark.parametrize("words_per_chunk", [1, 2, 3])
@pytest.mark.parametrize(("start", "stop"), [(0, 500), (64, 128), (100, 321), (191, 193)])
def test_signs_do_not_depend_on_how_many_are_made_at_once(
    monkeypatch, words_per_chunk, start, stop
):
    monkeypatch.setattr(curvature.products.probes, "WORDS_PER_CHUNK", {"cpu": words_per_chunk})
    whole = splitmix64_signs("w", 500, seed=0, probe=1)
    assert rademacher("w", start, stop, seed=0, probe=1).tolist() == whole[start:stop]


def test_golden_signs():
    """Results of different machines and years are comparable only while these stay."""
    first = rademacher("lm_head.weight", 0, 8, seed=0, probe=0)
    later = rademacher("model.norm.weight", 1000, 1008, seed=5, probe=3)
    assert first.tolist() == [-1, 1, 1, 1, -1, -1, -1, 1]
    assert later.tolist() == [-1, 1, -1, 1, -1, 1, 1, -1]


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 64), (1, 63), (63, 65), (64, 128), (100, 777), (995, 1000), (5, 5)]
)
def test_a_shard_holds_its_slice_of_the_whole(start, stop):
    whole = rademacher("w", 0, 1000, seed=3, probe=2)
    assert torch.equal(rademacher("w", start, stop, seed=3, probe=2), whole[start:stop])


def test_signs_are_balanced_and_uncorrelated():
    """Sums of n signs have s.d. sqrt(n); 5 of them would be one chance in 1.7 million."""
    n = 100_000
    streams = [
        rademacher(name, 0, n, seed=seed, probe=probe)
        for name, seed, probe in itertools.product(("a.weight", "b.weight"), (0, 1), (0, 1))
    ]
    assert all(set(stream.unique().tolist()) == {-1, 1} for stream in streams)
    assert all(abs(int(stream.sum())) < 5 * n**0.5 for stream in streams)
    for first, other in itertools.combinations(streams, 2):
        assert abs(int((first * other).sum())) < 5 * n**0.5
    for lag in (1, 2, 63, 64, 65):
        assert abs(int((streams[0][lag:] * streams[0][:-lag]).sum())) < 5 * n**0.5


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
