"""A stand-in for the interpreter that measures: `python -m tests.slurm.stand_in PYTHON ARGUMENTS`.

It does what the step of this command would leave behind, or fails as TO_FAIL says; a training in
TO_DIVERGE diverges at its first update. `python -m slurm` it runs, with short pauses.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from base.cli import run_command
from base.files import write_sealed
from slurm.__main__ import app
from slurm.job import element, supervision
from slurm.submission.record import existing_submission
from study.definition import load_study
from study.step import Machine, Step, batches, resolve, shared
from study.steps import steps_of
from tests.sealing import write_ending
from train.run.directory import RunDirectory

PAUSE_SECONDS = 0.5  # of jobs, in place of half a minute


def submitted_batches(study_dir: Path) -> Iterator[list[Step]]:
    """Yield the steps of every command that the elements of a study start."""
    submission, steps = existing_submission(study_dir), steps_of(load_study(study_dir))
    limits, by_name = submission.site.limits, {step.name: step for step in steps}
    for names in (names for array in submission.arrays for names in array.elements):
        of_element = [by_name[name] for name in names]
        yield from batches(of_element, limits.checkpoints_per_job, limits.specs_per_job)


def main(command: list[str]) -> None:
    """Note the steps of a command in ran.txt and write their outputs."""
    if command[1:3] == ["-m", "slurm"]:
        element.PAUSE_SECONDS = supervision.TRY_SECONDS = PAUSE_SECONDS
        supervision.REQUEUE_SECONDS = 2  # whole seconds
        sys.argv = command[2:]
        run_command(app, "slurm")
        return
    study_dir = Path(os.environ["STUDY_DIR"])
    device = "cuda" if "cuda" in command else "cpu"
    machine = Machine(python=command[0], device=device)
    for batch in submitted_batches(study_dir):
        trains = batch[0].kind == "train" and str(study_dir / batch[0].run) in command
        if trains or resolve(shared(batch), study_dir, machine) == command:
            names = [step.name for step in batch]
            with (study_dir / "ran.txt").open("a") as log:
                log.write(names[0] + "\n")
            if names[0] in os.environ.get("TO_FAIL", "").split():
                print("error: this measurement is refused; choose another", file=sys.stderr)
                sys.exit(2)
            if names[0] in os.environ.get("TO_DIVERGE", "").split():
                run = RunDirectory(study_dir / batch[0].run)
                run.path.mkdir(exist_ok=True)
                reason = f"{run.path.name} diverged at step 1: not finite: loss nan"
                write_ending(run, "diverged", 1, fingerprint=batch[0].settings, reason=reason)
                sys.exit(2)
            for step in batch:
                for output in step.outputs:
                    (study_dir / output).parent.mkdir(parents=True, exist_ok=True)
                    write_sealed(study_dir / output, {"of": step.name})


if __name__ == "__main__":
    main(sys.argv[1:])
