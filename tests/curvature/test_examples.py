"""The examples in the docstrings of the numeric functions are what they compute."""

import doctest
import importlib
from pathlib import Path

import pytest

import curvature

FOLDER = Path(curvature.__file__).parent
FILES = sorted(path for path in FOLDER.rglob("*.py") if ">>>" in path.read_text())
MODULES = [".".join(path.relative_to(FOLDER.parent).with_suffix("").parts) for path in FILES]


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name):
    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted > 0
    assert found.failed == 0
