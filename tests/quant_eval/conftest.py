"""Libraries run in processes of their own; here these are forks."""

import sys

import pytest

from quant_eval.libraries import job
from tests.interpreter import interpreter

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
