"""Submitted studies for the tests of watching: made steps, metrics, logs and a submission,
written by hand.
"""

import json
from pathlib import Path

from dynamics.recipes import resolve
from slurm.site import Limits, Site
from slurm.states import JobState
from slurm.submission.arrays import arrays_of
from slurm.submission.record import (
    Submission,
    append,
    existing_submission,
    log_of,
    write_plan,
)
from study.definition import Study, save_study
from study.pipeline.ledger import Ledger
from study.pipeline.steps import steps_of
from tests.sealing import json_lines
from train.run.directory import RunDirectory


def small_study() -> Study:
    """Two runs with two checkpoints and two specs each; curvature, and nothing that is measured
    at the end alone.
    """
    tiny = resolve("tiny", "smoke")
    quantization = tiny.quantization.model_copy(update={"along": (), "methods": (), "by_block": ()})
    annealed = (run for run in tiny.trained if run.schedule.anneal)
    runs = tuple(run.model_copy(update={"averages": ()}) for run in annealed)
    changed = {
        "name": "small",
        "runs": runs,
        "averaged_steps": (),
        "soups": (),
        "quantization": quantization,
    }
    return tiny.model_copy(update=changed)


def site_of(root: Path, **fields: str) -> Site:
    """A cluster of one process on a node."""
    kind = {"ranks_per_node": 1, "time": "10"}
    return Site.model_validate(
        {
            "root": str(root),
            "resources": dict.fromkeys(("train", "export", "quantize", "curvature", "light"), kind),
            "limits": {"stop_seconds_before_limit": 60, "starts_without_progress": 1},
            **fields,
        }
    )


def submitted(study_dir: Path, study: Study, first_job: int = 11) -> Submission:
    """Every array of the study as submitted, numbered from `first_job`."""
    save_study(study_dir, study)
    arrays = arrays_of(study, Limits())
    (study_dir / "slurm/logs").mkdir(parents=True, exist_ok=True)
    # nothing of it is started, and a checkout whose path has a space is none for SLURM
    site = site_of(study_dir.parent, python="/opt/python", project="/opt/quantdyn")
    write_plan(study_dir, site, arrays, anew=True)
    for number, array in enumerate(arrays, start=first_job):
        submit(study_dir, array.name, number, list(range(len(array.elements))))
    return existing_submission(study_dir)


def submit(study_dir: Path, array: str, job: int, indices: list[int]) -> None:
    """Records a call of sbatch and its answer."""
    call = {"token": f"quantdyn:{job}", "array": array, "indices": indices, "script": "0" * 16}
    append(study_dir, "calling", **call, time=0.0)
    append(study_dir, "submitted", job=job)


def make(study_dir: Path, study: Study, names: list[str], seconds: float = 30.0) -> None:
    """Makes steps: their outputs, and the records that say so."""
    ledger = Ledger(study_dir, steps_of(study))
    for name in names:
        for output in ledger.steps[name].outputs:
            path = study_dir / output
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"made by": name, "output": output}))
        ledger.finish(ledger.steps[name], ledger.fingerprint(ledger.steps[name]), seconds)


def write_metrics(study_dir: Path, run: str, steps: range, attempt: int, **changes: float) -> None:
    """Rows of training at 2,000 tokens a step and 1,000 tokens a second."""
    path = RunDirectory(study_dir / run).metrics
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for step in steps:
            row = {
                "step": step,
                "tokens": 2000 * step,
                "attempt": attempt,
                "time": 1.7e9 - step,
                "loss": 5 - step / 100,
            }
            file.write(
                json_lines([row | {"learning_rate": 1e-3, "tokens_per_second": 1000.0} | changes])
            )
            file.write(json_lines([row | {"held_out_loss": 9.0}]))


def write_ranks(
    study_dir: Path,
    run: str,
    step: int,
    attempt: int,
    alone: list[float],
    figure: str = "busy_seconds_p50",
) -> None:
    """A report of ranks, two on a node: what each does alone."""
    path = RunDirectory(study_dir / run).ranks
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for rank, seconds in enumerate(alone):
            row = {"step": step, "attempt": attempt, "rank": rank, "host": f"node{rank // 2 + 1}"}
            file.write(json.dumps(row | {figure: seconds}) + "\n")


def write_attempts(study_dir: Path, run: str, count: int) -> None:
    """So many starts of a training."""
    path = RunDirectory(study_dir / run).environment_json
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"attempts": [{"host": "node1"}] * count}))


def write_log(study_dir: Path, submission: Submission, array: str, index: int, *lines: str) -> Path:
    """Adds to the log of an element."""
    log = log_of(study_dir, array, submission.element_ids[array, index])
    with log.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    return log


def in_state(
    state: str, reason: str = "None", nodes: str = "", restarts: int = 0, code: str | None = None
) -> JobState:
    """The state of an element in SLURM."""
    return JobState(state, reason, nodes, restarts, code)
