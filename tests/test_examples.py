"""The examples in the docstrings of all source are what they compute."""

import doctest
import importlib
from pathlib import Path

import pytest

from tests.test_words import PROJECT, sources

PROMPT = ">>> "
FEWEST = 60  # examples: less means that some are no longer read


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


def docstrings_of(path: Path) -> list[doctest.DocTest]:
    """Docstrings of a module with their examples."""
    found = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name_of(path)))
    return [test for test in found if test.examples]


WITH_EXAMPLES = [path for path in sources() if PROMPT in path.read_text()]


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=name_of)
def test_examples_hold(path):
    failures: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    tests = docstrings_of(path)
    for test in tests:
        runner.run(test, out=failures.append)
    assert not failures, "".join(failures)
    # an example in a property, or in what another decorator made, would go unread
    assert runner.tries == path.read_text().count(PROMPT)


def test_examples_are_there():
    assert len(WITH_EXAMPLES) > 0
