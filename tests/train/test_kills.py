"""A run is killed and stopped at random moments of training and saving, again and again.

What holds after every one: no complete checkpoint is lost or damaged, and the next attempt resumes
from the newest full one; most permanent ones hold weights alone. At the end all weights and figures
are those of a run that was left alone. A few times here, a hundred times per engine, and sixty
times on four ranks with the buckets of GPUs, under `make stress`.
"""

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.checkpoint import verified_record
from tests.forked import Forked
from tests.runs import ended, make_run, start_ranks, succeed
from tests.train.stalled import bucketed, stalling
from tests.train.trajectories import assert_same
from tests.waiting import wait_until
from train.checkpoints.saving import UNFINISHED
from train.model.config import ModelConfig
from train.run.directory import RunDirectory, read_checkpoint_record
from train.run.environment import attempts
from train.run.history import history, surviving
from train.run.metrics import read_metrics
from train.run.optimization import Lawa
from train.run.saving import SavingConfig

ENDED_WITHIN_SECONDS = 1.0  # of the first step of an attempt
# Borders of ranks cut rows of its matrices.
MODEL = ModelConfig(
    vocab_size=320,
    hidden_size=48,
    intermediate_size=88,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
BUCKET_ELEMENTS = 3000  # of MODEL a dozen


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


def saves(directory: RunDirectory) -> bool:
    """Return whether a checkpoint is being written."""
    return any(
        any(parent.glob(f"{UNFINISHED}*")) for parent in (directory.checkpoints, directory.restarts)
    )


def survive(
    root: Path,
    inputs: dict[str, Any],
    *,
    endings: Sequence[str],
    processes: int,
    steps_per_attempt: int,
    buckets: int | None = None,
    **settings: Any,
) -> int:
    """Trains a run whose attempts end by `endings`, and one that is left alone; compares them.

    An attempt comes no further than `steps_per_attempt` steps, until one rank is asked to stop.

    Args:
        root: for the runs.
        inputs: of the runs.
        endings: of the attempts, each "kill" or "stop".
        processes: of the run.
        steps_per_attempt: see above.
        buckets: elements of a bucket, if as on GPUs.
        settings: of the runs.

    Returns:
        The endings that fell into a save.
    """
    total = 8 + steps_per_attempt * len(endings)
    settings = {"evaluate_every_steps": 3} | settings
    settings |= {
        "total_steps": total,
        "save_steps": (*range(0, total, 7), total),
        "saving": SavingConfig(asynchronous=True, restart_every_steps=2, full_steps=(14,)),
    }
    ended_often, whole = RunDirectory(root / "ended_often"), RunDirectory(root / "whole")
    make_run(ended_often.path, **inputs, **settings)
    make_run(whole.path, **inputs, **settings)
    variables = bucketed(buckets) if buckets else {}

    def train(directory: RunDirectory, stalled: dict[str, str]) -> Forked:
        command = ("tests.train.stalled", "train", "run", str(directory.path))
        return start_ranks(processes, *command, variables=variables | stalled)

    chance = random.Random(7)
    known: set[int] = set()
    resumed_from: list[int | None] = []
    in_saves = 0
    for attempt, ending in enumerate(endings, 1):
        begun = newest(ended_often)
        resumed_from.append(begun)
        released = root / f"released{attempt}"
        last = (begun or 0) + steps_per_attempt
        training = train(ended_often, stalling(released, step=last + 1))
        wait_until(
            partial(has_rows, ended_often, attempt), f"a step of attempt {attempt}", training
        )
        wait_until_chosen(ended_often, chance)
        assert training.poll() is None
        in_saves += saves(ended_often)
        if ending == "kill":
            training.kill()
        else:
            os.kill(training.pid(chance.randrange(processes)), signal.SIGUSR1)
            released.touch()
            succeed(ended(training))
        assert known <= set(ended_often.complete_steps())
        known = set(ended_often.complete_steps())
        newest_step = newest(ended_often)
        assert begun is None or (newest_step is not None and newest_step >= begun)
        if ending == "stop":  # nothing of it is lost
            assert newest_step == json.loads(ended_often.status_json.read_text())["step"]

    for directory in (ended_often, whole):
        succeed(ended(train(directory, {})))
    recorded = [entry["resumed_from_step"] for entry in attempts(ended_often.environment_json)]
    assert recorded[: len(resumed_from)] == resumed_from
    works = history(ended_often)
    assert sum(surviving(works)) == read_metrics(ended_often.metrics)[-1]["step"]
    assert not ended_often.quarantine.exists()
    assert ended_often.complete_steps() == whole.complete_steps()
    assert_same(ended_often, whole, *ended_often.complete_steps())
    return in_saves


def wait_until_chosen(directory: RunDirectory, chance: random.Random) -> None:
    """Wait for a random time; every other time on average, until the next save begins then."""
    awaits_save = chance.random() < 0.5
    time.sleep(chance.uniform(0, ENDED_WITHIN_SECONDS))
    deadline = time.monotonic() + ENDED_WITHIN_SECONDS
    while awaits_save and not saves(directory) and time.monotonic() < deadline:
        time.sleep(0.0005)


def test_one_kill(tmp_path, inputs):
    survive(
        tmp_path,
        inputs,
        endings=["kill"],
        processes=1,
        steps_per_attempt=8,
        engine="deepspeed",
    )


@pytest.mark.stress
@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_a_hundred_kills(tmp_path, inputs, engine):
    endings = ["kill"] * 100
    survive(tmp_path, inputs, endings=endings, processes=2, steps_per_attempt=15, engine=engine)


# With all kinds of state: main weights, moments, and averages.
STATEFUL: dict[str, Any] = {
    "model": MODEL,
    "buckets": BUCKET_ELEMENTS,
    "precision": "bf16",
    "batch_size": 8,
    "micro_batch_size": 2,
    "averages": (Lawa(interval_steps=3, window=2),),
}


def test_a_kill_and_a_stop_on_four_ranks(tmp_path, inputs):
    survive(
        tmp_path, inputs, endings=["kill", "stop"], processes=4, steps_per_attempt=6, **STATEFUL
    )


@pytest.mark.stress
def test_sixty_kills_and_stops_on_four_ranks(tmp_path, inputs):
    chance = random.Random(11)
    endings = chance.sample(["kill", "stop"], k=60, counts=[40, 20])
    in_saves = survive(
        tmp_path, inputs, endings=endings, processes=4, steps_per_attempt=10, **STATEFUL
    )
    assert in_saves >= 10
    print(f"{in_saves} of 60 fell into a save")
