"""A study of seconds, run once by the local runner and once as jobs, and the site of the lab.

What is started is forked from a process after its imports.
"""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from dynamics.recipes import resolve
from dynamics.recipes.parts import places_of_runs
from slurm.site import Site
from study.definition import Study, save_study
from study.machine.hardware import Hardware
from study.machine.needs import Needs
from study.machine.run_configurations import write_run_configurations
from study.pipeline.locks import locked
from study.pipeline.runner import Runner
from study.pipeline.step import Machine, Step
from study.pipeline.steps import steps_of
from study.results.table import TABLE
from study.text.kinds import TokenFiles
from tests.interpreter import interpreter

PROJECT = Path(__file__).resolve().parent.parent.parent


def small_study(
    name: str,
    *,
    steps: int,
    runs: int,
    restart_every: int | None,
    curved: bool,
    text: TokenFiles | None = None,
) -> Study:
    """The smoke profile of `tiny` with other lengths: checkpoints half-way and at the end.

    With a `text` that is there already, of 320 tokens, it reads that, 512 tokens a step.
    """
    smoke = resolve("tiny", "smoke")
    content = smoke.model_dump(mode="json") | {"name": name, "averaged_steps": [], "soups": []}
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
    content["quantization"] |= {
        "specs": ["gptq-b3-g32", "rtn-b4-g32"],
        "along": [],
        "methods": [],
        "by_block": [],
    }
    content["quantization"] |= {"eval_tokens": 16_384, "calibration_sequences": 16}
    content["curvature"] = content["curvature"] if curved else None
    return Study.model_validate_json(json.dumps(content))


def text_of(inputs: dict[str, Path]) -> TokenFiles:
    """The token files of the tests, as a text that is there."""
    return TokenFiles(
        train=str(inputs["train_prefix"]),
        held_out=str(inputs["held_out_prefix"]),
        calibration=str(inputs["train_prefix"]),
        tokenizer=str(inputs["tokenizer_dir"]),
        sha256="0" * 64,
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


def run_here(root: Path, study: Study, workers: int = 2) -> Path:
    """The study by the local runner, up to its table; its directory."""
    directory = root / study.name
    with locked(directory) as lock_fd:
        write_run_configurations(directory, study)
        save_study(directory, study)
        hardware = Hardware(workers)
        needs = Needs(study, hardware, directory)
        steps = [step for step in steps_of(study) if step.kind not in ("report", "mirror")]

        def machine_of(step: Step) -> Machine:
            return replace(needs.machine(step), python=interpreter())

        Runner(directory, steps, hardware, lock_fd, machine_of).run()
    return directory


def table(directory: Path) -> list[dict]:
    """The rows of the study's table."""
    return pq.read_table(directory / TABLE).to_pylist()
