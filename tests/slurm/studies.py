"""Studies of the tests of SLURM: of seconds, for the lab, and written by hand, to be looked at.

`small_study` and `site_of` are run as jobs of the lab; what is started is forked from a process
after its imports. `watched_study` and `watched_site` are of tests that start nothing: steps,
metrics, logs and a submission are written by the functions below them.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pydantic import BaseModel

from slurm.cluster import JobState
from slurm.site import JobLimits, Site
from slurm.submission.arrays import arrays_of
from slurm.submission.record import Submission, append, existing_submission, log_of, write_plan
from study.definition import Study, save_study
from study.machine.hardware import Hardware
from study.machine.needs import Needs, write_run_configurations
from study.pipeline.ledger import Ledger
from study.pipeline.runner import Runner, locked
from study.recipes.parts import places_of_runs
from study.recipes.resolve import resolve
from study.results.table import TABLE
from study.step import Machine, Step
from study.steps import steps_of
from study.text_kinds import PreparedText
from tests.interpreter import interpreter
from tests.runs import PROJECT
from tests.sealing import json_lines
from tests.study.synthetic import text_in_place
from train.run.directory import RunDirectory


def changed[Model: BaseModel](model: Model, **changes: Any) -> Model:
    """Return a model with other values; `slurm={"partition": "spot"}` changes one of its slurm."""
    for name, value in changes.items():
        before = getattr(model, name)
        if isinstance(before, BaseModel) and isinstance(value, dict):
            changes[name] = changed(before, **value)
    return model.model_copy(update=changes)


def small_study(
    name: str,
    *,
    steps: int,
    runs: int,
    restart_every: int | None,
    curved: bool,
    text: PreparedText | None = None,
) -> Study:
    """The smoke profile of `tiny` with other lengths: checkpoints half-way and at the end.

    With a `text` that is there already, of 320 tokens, it reads that, 512 tokens a step.
    """
    smoke = resolve("tiny", "smoke")
    content = smoke.model_dump(mode="json") | {"name": name, "averaged_steps": [], "soups": []}
    content |= {"planes": [], "critical": None}
    # without the controls
    content["runs"] = [run for run in content["runs"] if run["schedule"]["anneal"]][:runs]
    for run in content["runs"]:
        run |= {"total_steps": steps, "save_steps": [steps // 2, steps], "averages": []}
        run["schedule"]["anneal"]["start_step"] = steps // 2
        run["saving"]["restart_every_steps"] = restart_every
        if text:
            run["data"] |= places_of_runs(text) | {"sequence_length": 64, "held_out_sequences": 16}
            run["model"]["vocab_size"] = 320
            run |= {"batch_size": 8, "micro_batch_size": 4}
            run["schedule"]["warmup_tokens"] = 8 * 512
    if text:
        content["text"] = text.model_dump(mode="json")
    content["quantization"] |= {"along": [], "methods": [], "by_block": []}
    content["quantization"] |= {"specs": ["gptq-b3-g32", "rtn-b4-g32"]}
    content["quantization"] |= {"eval_tokens": 16_384, "calibration_sequences": 16}
    content["curvature"] = content["curvature"] if curved else None
    return Study.model_validate_json(json.dumps(content))


def text_of(inputs: dict[str, Path]) -> PreparedText:
    """The token files of the tests, as a text that is there."""
    return text_in_place(
        train=inputs["train_prefix"],
        held_out=inputs["held_out_prefix"],
        calibration=inputs["train_prefix"],
        tokenizer=inputs["tokenizer_dir"],
    )


def site_of(root: Path, *, train_minutes: int = 60, train_nodes: int = 2, starts: int = 3) -> Site:
    """Jobs of a core; training on nodes of one rank each."""
    job = {"ranks_per_node": 1, "cpus_per_node": 1, "time": "60"}
    kinds = dict.fromkeys(("export", "quantize", "curvature", "light"), job)
    kinds["train"] = job | {"nodes": train_nodes, "time": str(train_minutes)}
    return Site.model_validate(
        {
            "root": root,
            "project": PROJECT,
            "python": interpreter(),
            "resources": kinds,
            "limits": {
                "stop_seconds_before_limit": 10,
                "starts_without_progress": starts,
                "hang_seconds": 60,
                "silent_seconds": 180,  # for what no rank sees
            },
            "environment": {"GLOO_SOCKET_IFNAME": "lo"},
            "mlflow": {"every_seconds": 10},
            "disk": {"reserve_gb": 0.1},
        }
    )


def write_site(path: Path, content: dict[str, Any]) -> Path:
    """Write a site file; basic strings of TOML are JSON's."""

    def text(value: Any) -> str:
        if isinstance(value, dict):
            entries = (f"{json.dumps(key)} = {text(entry)}" for key, entry in value.items())
            return f"{{{', '.join(entries)}}}"
        return json.dumps(value).replace("\x7f", "\\u007f")

    lines = (f"{json.dumps(key)} = {text(value)}\n" for key, value in content.items())
    path.write_text("".join(lines))
    return path


def run_here(root: Path, study: Study, workers: int = 2) -> Path:
    """The study by the local runner, up to its table; its directory."""
    directory = root / study.name
    with locked(directory) as lock_fd:
        write_run_configurations(directory, study)
        save_study(directory, study)
        hardware = Hardware(workers)
        needs = Needs(study, hardware)
        steps = [step for step in steps_of(study) if step.kind not in ("report", "mirror")]

        def machine_of(step: Step) -> Machine:
            return replace(needs.machine(step), python=interpreter())

        Runner(directory, steps, hardware, lock_fd, machine_of).run()
    return directory


def table(directory: Path) -> list[dict]:
    """The rows of the study's table."""
    return pq.read_table(directory / TABLE).to_pylist()


def watched_study() -> Study:
    """Two runs of two checkpoints and specs; curvature, and nothing of the end alone."""
    tiny = resolve("tiny", "smoke")
    runs = tuple(changed(run, averages=()) for run in tiny.trained if run.schedule.anneal)
    quantization = {"along": (), "methods": (), "by_block": ()}
    none = {"averaged_steps": (), "soups": (), "planes": (), "critical": None}
    return changed(
        tiny,
        name="small",
        runs=runs,
        quantization=quantization,
        **none,
    )


def watched_site(root: Path, **fields: str) -> Site:
    """A cluster of one process on a node."""
    kind = {"ranks_per_node": 1, "time": "10"}
    return Site.model_validate(
        {
            "root": str(root),
            "resources": dict.fromkeys(("train", "export", "quantize", "curvature", "light"), kind),
            "limits": {"stop_seconds_before_limit": 60, "starts_without_progress": 1},
            "disk": {"reserve_gb": 0},  # whatever is free where the tests run
            **fields,
        }
    )


def submitted(study_dir: Path, study: Study, first_job: int = 11) -> Submission:
    """Every array of the study as submitted, numbered from `first_job`."""
    save_study(study_dir, study)
    arrays = arrays_of(study, JobLimits())
    (study_dir / "slurm/logs").mkdir(parents=True, exist_ok=True)
    # nothing of it is started, and a checkout whose path has a space is none for SLURM
    site = watched_site(study_dir.parent, python="/opt/python", project="/opt/quantdyn")
    write_plan(study_dir, site, arrays, anew=True)
    for number, array in enumerate(arrays, start=first_job):
        record_call(study_dir, array.name, number, list(range(len(array.elements))))
    return existing_submission(study_dir)


def record_call(study_dir: Path, array: str, job: int, indices: list[int]) -> None:
    """Records a call of sbatch and its answer."""
    call = {"token": f"quantdyn:{job}", "array": array, "indices": indices, "script": "0" * 16}
    append(study_dir, "calling", **call, time=0.0, user="root")
    append(study_dir, "submitted", job=job)


def make(study_dir: Path, study: Study, names: Iterable[str]) -> None:
    """Makes steps: their outputs, and the records that say so."""
    ledger = Ledger(study_dir, steps_of(study))
    for step in (ledger.steps[name] for name in names):
        for output in step.outputs:
            path = study_dir / output
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"made by": step.name, "output": output}))
        ledger.finish(step, ledger.fingerprint(step), seconds=30.0)


def write_metrics(study_dir: Path, run: str, steps: range, attempt: int, **changes: float) -> None:
    """Rows of training at 2,000 tokens a step and 1,000 tokens a second."""
    path = RunDirectory(study_dir / run).metrics
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for step in steps:
            row: dict[str, Any] = {"step": step, "tokens": 2000 * step, "attempt": attempt}
            row |= {"time": 1.7e9 - step, "loss": 5 - step / 100}
            trained = {"learning_rate": 1e-3, "tokens_per_second": 1000.0}
            file.write(json_lines([row | trained | changes, row | {"held_out_loss": 9.0}]))


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
