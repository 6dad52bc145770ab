"""Tiny models, each made once; libraries run in processes of their own, which are forks here."""

import sys

import pytest

from quant_eval.libraries import job
from tests.interpreter import interpreter
from tests.quant_eval.models import make_model

REAL = sys.executable  # a test may put another in its place


class _Sys:
    """Takes the place of `sys` where a library is started."""

    @property
    def executable(self) -> str:
        return interpreter() if sys.executable == REAL else sys.executable


@pytest.fixture(scope="session", autouse=True)
def forked_libraries():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "sys", _Sys())
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """`tiny(name)`: the HF directory of a tiny model of an architecture, to be read alone."""
    directories = {}

    def made(name):
        if name not in directories:
            directories[name] = make_model(tmp_path_factory.mktemp(name) / "hf", name)
        return directories[name]

    return made
