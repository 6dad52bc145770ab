"""STOP files: they ask a training to end at a checkpoint.

The user writes them, and so does an element whose job has to end. Only the user's stop is final.
"""

from collections.abc import Sequence
from pathlib import Path

from slurm.job.supervision import say
from study.pipeline.step import Step
from train.run.directory import RunDirectory

OURS = "slurm"  # begins what an element writes into a STOP file; any other is the user's


def ask_to_stop(study_dir: Path, step: Step, start: str) -> bool:
    """Ask a training to stop; return False where the file cannot be written."""
    stop = RunDirectory(study_dir / step.run).stop_file
    try:
        if not stop.exists():
            stop.write_text(f"{OURS} {start}\n")
    except OSError as error:
        say(f"{stop} could not be written ({error}); training is ended without a checkpoint")
        return False
    say(f"asked to stop; {stop} is left for training")
    return True


def stopped_by_user(study_dir: Path, run: str) -> bool:
    """Return whether training ended because of the user's STOP file, or one waits for it."""
    directory = RunDirectory(study_dir / run)
    if directory.stop_file.exists():
        return not directory.stop_file.read_text().startswith(OURS)
    status = directory.status_json
    return status.exists() and '"preempted"' in status.read_text() and "STOP" in status.read_text()


def forget_stale_stops(study_dir: Path, steps: Sequence[Step]) -> None:
    """Remove STOP files of earlier starts, which would end this one."""
    for step in steps:
        stop = RunDirectory(study_dir / step.run).stop_file
        if step.kind == "train" and stop.exists() and stop.read_text().startswith(OURS):
            stop.unlink()
