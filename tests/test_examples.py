"""The examples in docstrings are what the functions compute."""

import doctest
import importlib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
FOLDERS = ("base", "train", "ckpt_tools", "quant_eval", "curvature", "study", "slurm")
FILES = [
    path
    for folder in FOLDERS
    for path in sorted((PROJECT / folder).rglob("*.py"))
    if ">>>" in path.read_text()
]
MODULES = [".".join(path.relative_to(PROJECT).with_suffix("").parts) for path in FILES]
LEAST = 38  # files with an example


def test_there_are_examples():
    assert len(MODULES) >= LEAST


@pytest.mark.parametrize("name", MODULES)
def test_examples_hold(name):
    ran = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert ran.attempted > 0
    assert ran.failed == 0
