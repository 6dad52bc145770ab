"""A study by the real runner whose steps only read and write, as measurements do: no torch.

`python -m tests.nfs_study ROOT` runs it below ROOT, as `study run` does, with the same errors and
exit codes. `python -m tests.nfs_study step PYTHON ARGUMENTS` is a step: with the project's own
functions it writes what the step of this command leaves behind, bytes that follow from its name,
after it has verified what the step reads.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from base.cli import run_command
from base.errors import UserError
from base.files import (
    FileRecord,
    committed_directory,
    record_files,
    replaced_file,
    verify_files,
    write_sealed,
)

if TYPE_CHECKING:
    from study.definition import Study

NAME = "nfs"
FILE_BYTES, FILES = 200_000, 4
UPDATES = 40  # between two checkpoints
UPDATE_SECONDS = 0.2
FINAL = ("report", "mirror")  # made from the table


def tiny() -> "Study":
    """A training of two checkpoints, which are exported and rounded."""
    from study.definition import Study
    from study.recipes.resolve import resolve

    content = resolve("tiny", "smoke").model_dump(mode="json") | {"name": NAME}
    content |= {"averaged_steps": [], "soups": [], "planes": [], "critical": None}
    content["curvature"] = None
    content["runs"] = [run for run in content["runs"] if run["schedule"]["anneal"]][:1]
    for run in content["runs"]:
        run["averages"] = []
    content["quantization"] |= {
        "along": [],
        "methods": [],
        "by_block": [],
        "specs": ["rtn-b3-g32", "rtn-b4-g32"],
    }
    return Study.model_validate_json(json.dumps(content))


def run(root: Path) -> None:
    """Run the study, or resume it."""
    # Here, as every import takes its time in each of the steps.
    from study.definition import save_study
    from study.machine.hardware import Hardware
    from study.pipeline.processes import Processes
    from study.pipeline.runner import Runner, StepError, locked
    from study.step import Machine, resolve
    from study.steps import steps_of

    directory, study = root / NAME, tiny()
    machine = Machine(python=os.environ["STAND_IN"])
    steps = [step for step in steps_of(study) if step.kind not in FINAL]
    plan = [
        {
            "name": step.name,
            "kind": step.kind,
            "words": resolve(step.command, directory, machine),
            "models": resolve(step.models, directory, machine),
            "outputs": [str(directory / output) for output in step.outputs],
        }
        for step in steps
    ]
    Path(f"{machine.python}.json").write_text(json.dumps(plan))
    # A process that imports torch would only take time: nothing here needs it.
    setattr(Processes, "warm_up", lambda *_: None)  # noqa: B010
    try:
        with locked(directory) as lock_fd:
            save_study(directory, study)
            Runner(directory, steps, Hardware(2), lock_fd, lambda _: machine).run()
    except StepError as failure:
        typer.echo(f"error: {failure}", err=True)
        raise typer.Exit(1) from None


def step(command: list[str]) -> None:
    """Do the work of all steps of a command."""
    plan = json.loads(Path(f"{command[0]}.json").read_text())
    steps = [step for step in plan if set(step["words"]).issubset(command)]
    if not steps:
        raise UserError(f"{command} is no step; correct the stand-in")
    for one in steps:
        _work(one)


def _work(step: dict[str, Any]) -> None:
    """Verify what a step reads, and write its outputs."""
    for directory in step["models"]:
        _verify(Path(directory))
    for path in map(Path, step["outputs"]):
        if step["kind"] == "train":
            _train(step["name"], path)
        elif step["kind"] == "export":
            with committed_directory(path.parent) as unfinished:
                _fill(unfinished, step["name"], path.name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replaced_file(path.with_suffix(".bin")) as unfinished:
                unfinished.write_bytes(_bytes(step["name"], FILES * FILE_BYTES))
            write_sealed(path, {"of": step["name"]})


def _train(name: str, path: Path) -> None:
    """Log updates, then save a checkpoint, unless one is there that is complete."""
    if path.exists():
        return _verify(path.parent)
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    with (path.parents[2] / "metrics.jsonl").open("a") as log:
        for update in range(UPDATES):
            log.write(json.dumps({"step": update, "to": path.parent.name}) + "\n")
            log.flush()
            time.sleep(UPDATE_SECONDS)
    with committed_directory(path.parent) as unfinished:
        _fill(unfinished, name + path.parent.name, path.name)


def _fill(directory: Path, seed: str, record: str) -> None:
    for number in range(FILES):
        (directory / f"{number}.bin").write_bytes(_bytes(f"{seed} {number}", FILE_BYTES))
    files = {name: file.model_dump() for name, file in record_files(directory, "sha256").items()}
    write_sealed(directory / record, {"files": files})


def _verify(directory: Path) -> None:
    record = next(directory.glob("*.json"))
    files = json.loads(record.read_text())["files"]
    records = {name: FileRecord.model_validate(file) for name, file in files.items()}
    verify_files(directory, records, "remove it and run again")


def _bytes(seed: str, count: int) -> bytes:
    return hashlib.shake_128(seed.encode()).digest(count)


def digest(directory: Path) -> str:
    """Return the hash of all that the steps of the study have written, and of their names."""
    from study.definition import load_study
    from study.steps import steps_of

    found = hashlib.sha256()
    for one in steps_of(load_study(directory)):
        for output in one.outputs if one.kind not in FINAL else ():
            path = directory / output
            if path.name != "checkpoint.json" and one.kind != "export":
                found.update(path.with_suffix(".bin").read_bytes())
            else:
                _verify(path.parent)
            for file in sorted(path.parent.iterdir()):
                if file.is_file() and file.name.endswith((".bin", ".json", ".parquet")):
                    found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()


def main() -> None:
    """Do what the command line says."""
    first, *others = sys.argv[1:]
    app = typer.Typer(pretty_exceptions_enable=False)

    @app.command()
    def command() -> None:
        if first == "step":
            step(others)
        elif first == "digest":
            typer.echo(digest(Path(others[0])))
        else:
            run(Path(first))

    sys.argv[1:] = []
    run_command(app, "study")


if __name__ == "__main__":
    main()
