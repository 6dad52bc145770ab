"""STOP files: they ask a training to end at a checkpoint.

The user writes them, and so does an element whose job has to end. Only the user's stop is final.
"""

from collections.abc import Sequence
from pathlib import Path

from base.stopping import OTHER_RANK, SIGNALS
from slurm.job.supervision import say
from study.pipeline.step import Step
from train.run.directory import RunDirectory
from train.run.status import read_status

OURS = "slurm "  # begins what an element writes into a STOP file; any other is the user's
SIGNALLED = (*(signal.name for signal in SIGNALS), OTHER_RANK)


def ask_to_stop(study_dir: Path, step: Step, start: str) -> bool:
    """Ask a training to stop; return False where the file cannot be written."""
    stop = RunDirectory(study_dir / step.run).stop_file
    try:
        if not stop.exists():
            stop.write_text(f"{OURS}{start}\n")
    except OSError as error:
        say(f"{stop} could not be written ({error}); training is ended without a checkpoint")
        return False
    say(f"asked to stop; {stop} is left for training")
    return True


def stopped_by(study_dir: Path, step: Step) -> str | None:
    """Return who stopped the last attempt of a training: "user" or "job"; None: nobody.

    A STOP file that is still there has not been seen: it counts as well.
    """
    if step.kind != "train":
        return None
    directory = RunDirectory(study_dir / step.run)
    asked_by: str | None
    try:
        asked_by = directory.stop_file.read_text().strip() or "user"
    except FileNotFoundError:
        status = read_status(directory)
        asked_by = status.asked_by if status else None
    if asked_by is None:
        return None
    return "job" if asked_by.startswith(OURS) or asked_by in SIGNALLED else "user"


def forget_earlier_stops(study_dir: Path, steps: Sequence[Step]) -> None:
    """Remove STOP files of earlier starts, which would end this one."""
    for step in steps:
        stop = RunDirectory(study_dir / step.run).stop_file
        if step.kind == "train" and stop.exists() and stop.read_text().startswith(OURS):
            stop.unlink()
