"""The examples in the docstrings of all source are what they compute."""

import doctest
import importlib
from pathlib import Path

import pytest

from tests.test_imports import PROJECT
from tests.test_words import sources

PROMPT = ">>> "
WITH_EXAMPLES = [path for path in sources() if PROMPT in path.read_text()]
LEAST = 300  # lines with a prompt; fewer if examples are lost, or files are no longer read
# Imported into this process they would set up an engine: the functions there have no examples.
ENGINES = ("train.megatron", "train.deepspeed")


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=name_of)
def test_examples_hold(path):
    assert not name_of(path).startswith(ENGINES)
    module = importlib.import_module(name_of(path))
    printed: list[str] = []
    runner = doctest.DocTestRunner()

    for docstring in doctest.DocTestFinder().find(module):
        runner.run(docstring, out=printed.append)

    assert runner.failures == 0, "".join(printed)
    # doctest passes over a docstring that it does not find, such as that of a wrapped function
    assert runner.tries == path.read_text().count(PROMPT)


def test_no_example_is_lost():
    assert sum(path.read_text().count(PROMPT) for path in WITH_EXAMPLES) >= LEAST
