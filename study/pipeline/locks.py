"""The locks of a study: one runner at a time, and none beside the processes of a killed one.

STUDY/.runner.lock is held by the runner alone, STUDY/.steps.lock also by everything it started, so
a new runner can tell another one at work from the last processes of one that was killed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from base.errors import UserError
from base.files import take_lock

ORPHAN_SECONDS = 30.0  # supervise.py needs about 3 to end what a killed runner left


@contextmanager
def locked(directory: Path) -> Iterator[int]:
    """Hold both locks of a study; yield the descriptor of the one that steps inherit."""
    directory.mkdir(parents=True, exist_ok=True)
    with (
        (directory / ".runner.lock").open("a") as runner,
        (directory / ".steps.lock").open("a") as steps,
    ):
        if not take_lock(runner):
            raise UserError(
                f"another 'study run' works on {directory}; wait until it ends, or end it and run"
                " again"
            )
        if not take_lock(steps, ORPHAN_SECONDS):
            raise UserError(
                f"processes of an earlier run still work on {directory}; end them "
                f"('fuser {directory}/.steps.lock' lists them) and run again"
            )
        yield steps.fileno()
