"""kill -9 of a run at random moments of training and saving, again and again.

What holds after every kill: no complete checkpoint is lost or damaged, and the next attempt resumes
from the newest full one; most permanent ones hold weights alone. At the end all weights and figures
are those of a run that was never killed. A few times here, a hundred times per engine under
`make stress`.
"""

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.checkpoint import verified_record
from tests.runs import make_run, ranks, start_ranks, succeed
from tests.train.stalled import stalling
from tests.train.trajectories import assert_same
from tests.waiting import wait_until
from train.run.directory import RunDirectory, read_checkpoint_record
from train.run.environment import attempts
from train.run.saving import SavingConfig

KILLED_WITHIN_SECONDS = 1.0  # of the first step of an attempt


def newest(directory: RunDirectory) -> int | None:
    """The step of the newest full checkpoint; it, the newest of weights and restarts are whole."""
    permanent, restarts = directory.complete_steps(), directory.complete_restarts()
    for step in permanent[-1:]:
        verified_record(directory.checkpoint(step))
    for step in restarts:
        assert verified_record(directory.restart(step)).is_full
    full = [
        step for step in permanent if read_checkpoint_record(directory.checkpoint(step)).is_full
    ]
    return max(full + restarts, default=None)


def has_rows(directory: RunDirectory, attempt: int) -> bool:
    """Return whether an attempt has logged anything."""
    return directory.metrics.exists() and f'"attempt": {attempt},' in directory.metrics.read_text()


def survive(
    root: Path,
    inputs: dict[str, Any],
    *,
    kills: int,
    processes: int,
    steps_per_attempt: int,
    **settings: Any,
) -> None:
    """Trains a run that is killed `kills` times, and one that is not, and compares them.

    An attempt comes no further than `steps_per_attempt` steps.
    """
    total = 8 + steps_per_attempt * kills
    settings |= {
        "total_steps": total,
        "save_steps": (*range(0, total, 7), total),
        "evaluate_every_steps": 3,
        "saving": SavingConfig(asynchronous=True, restart_every_steps=2, full_steps=(14,)),
    }
    killed, whole = RunDirectory(root / "killed"), RunDirectory(root / "whole")
    make_run(killed.path, **inputs, **settings)
    make_run(whole.path, **inputs, **settings)
    command = ("tests.train.stalled", "train", "run", str(killed.path))
    chance = random.Random(7)
    known: set[int] = set()
    resumed_from: list[int | None] = []
    for attempt in range(1, kills + 1):
        begun = newest(killed)
        resumed_from.append(begun)
        stalled = stalling(root / "never", step=(begun or 0) + steps_per_attempt + 1)
        training = start_ranks(processes, *command, variables=stalled)
        wait_until(partial(has_rows, killed, attempt), f"a step of attempt {attempt}", training)
        time.sleep(chance.uniform(0, KILLED_WITHIN_SECONDS))
        assert training.poll() is None
        training.kill()
        assert known <= set(killed.complete_steps())
        known = set(killed.complete_steps())
        newest_step = newest(killed)
        assert begun is None or (newest_step is not None and newest_step >= begun)
    for directory in (killed, whole):
        succeed(ranks(processes, "train", "run", str(directory.path)))
    recorded = [entry["resumed_from_step"] for entry in attempts(killed.environment_json)]
    assert recorded[: len(resumed_from)] == resumed_from
    assert not killed.quarantine.exists()
    assert killed.complete_steps() == whole.complete_steps()
    assert_same(killed, whole, *killed.complete_steps())


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_one_kill(tmp_path, inputs, engine):
    survive(tmp_path, inputs, kills=1, processes=1, steps_per_attempt=8, engine=engine)


@pytest.mark.stress
@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_a_hundred_kills(tmp_path, inputs, engine):
    survive(tmp_path, inputs, kills=100, processes=2, steps_per_attempt=15, engine=engine)
