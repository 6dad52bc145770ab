"""Killed at random moments: a few times here, a hundred times per engine under `make stress`."""

import pytest

from tests.train.kills import survive


@pytest.mark.parametrize(("engine", "kills"), [("megatron", 1), ("deepspeed", 1)])
def test_a_few_kills(tmp_path, inputs, engine, kills):
    survive(tmp_path, inputs, kills=kills, processes=1, steps_per_attempt=8, engine=engine)


@pytest.mark.stress
@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_a_hundred_kills(tmp_path, inputs, engine):
    survive(tmp_path, inputs, kills=100, processes=2, steps_per_attempt=15, engine=engine)
