"""Submission of what can start, by a job: beside its work, and at its end."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from base.errors import UserError
from slurm.job.supervision import say
from slurm.submission.advance import advance

LOOK_SECONDS = 10.0  # between looks at the files of the work
ADVANCE_SECONDS = 600.0  # without news from these files: jobs that SLURM cancelled come back
TRIES, TRY_SECONDS = 20, 30.0  # at the end: a controller that restarts is away for minutes
PATIENCE_SECONDS = 120.0  # for another command that is submitting


class AdvancingBeside:
    """Submits what can start while a command works, whenever its work has come further.

    It does so in a thread: SLURM may take a minute to answer, and the job has to be stopped in
    time.
    """

    def __init__(self, study_dir: Path, outputs: Callable[[], list[str]]) -> None:
        self._study_dir, self._outputs = study_dir, outputs
        self._looked_at = self._advanced_at = time.monotonic()
        self._seen = outputs()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin to submit if there is news; called about every second."""
        now = time.monotonic()
        if now - self._looked_at < LOOK_SECONDS or (self._thread and self._thread.is_alive()):
            return
        self._looked_at, outputs = now, self._outputs()
        if outputs != self._seen or now - self._advanced_at >= ADVANCE_SECONDS:
            self._seen, self._advanced_at = outputs, now
            self._thread = threading.Thread(target=_advance, args=(self._study_dir,), daemon=True)
            self._thread.start()


def _advance(study_dir: Path) -> None:
    try:
        report(advance(study_dir))
    except (UserError, OSError) as error:  # another look is to come
        say(f"nothing was submitted: {error}")


def advance_at_end(study_dir: Path, job: str | None) -> None:
    """Submit what can start once this job has ended; try for some minutes."""
    for left in reversed(range(TRIES)):
        try:
            report(advance(study_dir, ending=job, patience_seconds=PATIENCE_SECONDS))
        except (UserError, OSError) as error:
            say(f"nothing was submitted: {error}")
            if left:
                time.sleep(TRY_SECONDS)
        else:
            return


def report(submitted: dict[str, int]) -> None:
    """Print what was submitted."""
    if submitted:
        say("submitted " + ", ".join(f"{name} {count}" for name, count in submitted.items()))
