"""The examples in the docstrings of the numeric functions are what they compute."""

import doctest
import importlib

import pytest

MODULES = (
    *("products.dual", "products.probes", "trace.hutchinson", "trace.gauss_newton"),
    *("spectrum.lanczos", "spectrum.density", "paired_traces", "slices.plane", "slices.figure"),
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name):
    found = doctest.testmod(importlib.import_module(f"curvature.{name}"))
    assert found.attempted > 0
    assert found.failed == 0
