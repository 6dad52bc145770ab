"""Pictures of vectors: against the textbook's definition, and the lengths that they keep."""

import math

import numpy as np
import pytest
import torch

import curvature.products.sketch
from curvature.products.parameters import Parameters, Probe
from curvature.products.probes import rademacher
from curvature.products.sketch import BUCKETS, ENTRIES_AT_ONCE, SIGNS_PROBE, CountSketch
from tests.curvature.conftest import dots_of


def picture(sketch: CountSketch, parameters: Parameters, v_p: torch.Tensor) -> torch.Tensor:
    parts = parameters.split(v_p)
    return sketch.whole(lambda name: sketch.part(name, parts[name]))


@pytest.mark.parametrize("at_once", [8, 16, ENTRIES_AT_ONCE])
def test_buckets_are_those_of_the_definition(monkeypatch, at_once):
    """Entry i of a tensor, times its sign, goes to bucket i mod 8; a tensor of 8 entries or
    fewer is kept as it is.
    """
    monkeypatch.setattr(curvature.products.sketch, "BUCKETS", 8)
    monkeypatch.setattr(curvature.products.sketch, "ENTRIES_AT_ONCE", at_once)
    parameters = Parameters(torch.nn.Linear(7, 5))
    v_p = torch.randn(parameters.size, generator=torch.Generator().manual_seed(0))
    sketch = CountSketch(parameters, Probe(3, 1))
    expected: list[float] = []
    for name, part in parameters.split(v_p).items():
        x = part.flatten().double().numpy()
        signs, along = (
            rademacher(name, 0, len(x), seed=3, probe=probe, dtype=torch.float64).numpy()
            for probe in (SIGNS_PROBE, 1)
        )
        buckets = np.zeros(min(len(x), 8))
        for index, entry in enumerate(signs * x):
            buckets[index % 8] += entry
        expected += [along @ x, *buckets]
    assert picture(sketch, parameters, v_p).tolist() == pytest.approx(expected, abs=1e-12)


def test_what_fits_its_buckets_is_kept_exactly():
    parameters = Parameters(torch.nn.Linear(30, 20))
    v_p = torch.randn(parameters.size, generator=torch.Generator().manual_seed(0))
    sketch = CountSketch(parameters, Probe(0, 0))
    picture_s = picture(sketch, parameters, v_p)
    assert sketch.norm(picture_s) == pytest.approx(float(v_p.double().norm()), rel=1e-12)
    along_p = parameters.probe(Probe(0, 0))
    assert sketch.dots(picture_s) == pytest.approx(dots_of(parameters, along_p, v_p), rel=1e-12)


@pytest.mark.parametrize("kind", ["all alike", "random", "one row", "the probe itself"])
def test_lengths_are_kept_within_the_stated_scatter(kind):
    """A million entries in 65,536 buckets: 4 times sqrt(2 / 65536) of the squared length, half
    of it of the length.
    """
    parameters = Parameters(torch.nn.Linear(1024, 1000, bias=False))
    v_p = torch.ones(parameters.size)
    if kind == "random":
        v_p = torch.randn(parameters.size, generator=torch.Generator().manual_seed(0))
    elif kind == "one row":
        v_p[1024:] = 0.0
    elif kind == "the probe itself":
        v_p = parameters.probe(Probe(0, 0))
    sketch = CountSketch(parameters, Probe(0, 0))
    norm = sketch.norm(picture(sketch, parameters, v_p))
    assert norm == pytest.approx(float(v_p.double().norm()), rel=2 * math.sqrt(2 / BUCKETS))


def test_differences_of_pictures_are_pictures_of_differences():
    parameters = Parameters(torch.nn.Linear(300, 400))
    a_p, b_p = torch.randn(
        2, parameters.size, generator=torch.Generator().manual_seed(0), dtype=torch.float32
    )
    sketch = CountSketch(parameters, Probe(0, 0))
    of_both, apart = (picture(sketch, parameters, v_p) for v_p in (a_p - b_p, a_p))
    torch.testing.assert_close(
        apart - picture(sketch, parameters, b_p), of_both, rtol=1e-5, atol=1e-5
    )
