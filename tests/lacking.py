"""Tests of what a machine may lack: programs and libraries of its own."""

import os
from typing import NoReturn

import pytest


def skip(reason: str) -> NoReturn:
    """Skips; fails where QUANTDYN_REQUIRE_SLURM=1, as in .ci/run, says that all is there."""
    if os.environ.get("QUANTDYN_REQUIRE_SLURM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
