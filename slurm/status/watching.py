"""`status --watch`: the study again and again, and what can start submitted each time."""

import time
from pathlib import Path

from base.errors import UserError
from slurm.status.overview import look
from slurm.status.table import lines_of
from slurm.submission.advance import advance

OVER = ("made", "failed", "cancelled")


def watch(study_dir: Path, seconds: int) -> None:
    """Print the status every so many seconds until nothing is to come."""
    while True:
        try:
            advance(study_dir)
        except UserError as error:
            print(f"nothing was submitted: {error}")
        overview = look(study_dir)
        print("\n".join(lines_of(overview)), flush=True)
        if all(element.situation in OVER for element in overview.elements):
            return
        time.sleep(seconds)
        print()
