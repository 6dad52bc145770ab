"""kill -9 of a run at random moments of training and saving, again and again.

What holds after every kill: no complete checkpoint is lost or damaged, and the next attempt goes on from the newest. At
the end all weights and figures are those of a run that was never killed.
"""

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.runs import make_run, ranks, torchrun
from tests.train.trajectories import kill, numbers, shard_hashes, started, wait_for
from train.run_directory import RunDirectory, verify_checkpoint
from train.settings import SavingConfig
from train.tracking import attempts

KILLED_WITHIN_SECONDS = 1.5  # of the first step of an attempt


def newest(directory: RunDirectory) -> int | None:
    """The step of the newest complete checkpoint, which must be whole."""
    permanent, restarts = directory.complete_steps(), directory.complete_restarts()
    for step in permanent[-1:]:
        verify_checkpoint(directory.checkpoint(step))
    for step in restarts:
        verify_checkpoint(directory.restart(step))
    return max(permanent + restarts, default=None)


def has_rows(directory: RunDirectory, attempt: int) -> bool:
    """Whether an attempt has logged anything."""
    return directory.metrics.exists() and f'"attempt": {attempt},' in directory.metrics.read_text()


def survive(root: Path, inputs: dict[str, Any], *, kills: int, processes: int, **settings: Any) -> None:
    """Trains a run that is killed `kills` times, and one that is not, and compares them."""
    total = 8 + 25 * kills
    settings |= {"total_steps": total, "save_steps": (*range(0, total, 7), total), "evaluate_every_steps": 3}
    killed, whole = RunDirectory(root / "killed"), RunDirectory(root / "whole")
    make_run(killed.path, **inputs, **settings, saving=SavingConfig(asynchronous=True, restart_every_steps=2))
    make_run(whole.path, **inputs, **settings)
    chance = random.Random(7)
    known: set[int] = set()
    resumed_from: list[int | None] = []
    done = 0
    while done < kills:
        attempt = len(resumed_from) + 1
        resumed_from.append(newest(killed))
        with started(torchrun(processes, "train", "run", str(killed.path))) as process:
            wait_for(partial(has_rows, killed, attempt), process)
            time.sleep(chance.uniform(0, KILLED_WITHIN_SECONDS))
            alive = process.poll() is None
            kill(process)
        done += alive
        assert known <= set(killed.complete_steps())
        known = set(killed.complete_steps())
        if resumed_from[-1] is not None:
            found = newest(killed)
            assert found is not None
            assert found >= resumed_from[-1]
        if not alive:
            assert killed.complete_steps()[-1] == total, process.returncode
            break
    for directory in (killed, whole):
        finished = ranks(processes, "train", "run", str(directory.path), timeout_seconds=600)
        assert finished.returncode == 0, finished.stderr[-3000:]
    recorded = [entry["resumed_from_step"] for entry in attempts(killed.environment_json)]
    assert recorded[: len(resumed_from)] == resumed_from
    assert not killed.quarantine.exists()
    assert killed.complete_steps() == whole.complete_steps()
    for step in killed.complete_steps():
        assert shard_hashes(killed.checkpoint(step)) == shard_hashes(whole.checkpoint(step)), step
    assert numbers(killed.path) == numbers(whole.path)
    assert done == kills, f"it ended after {done} kills; let it train for longer"
