"""Branches: a run that starts from a checkpoint of another one, such as a cooldown from a stable run.

Updates keep their numbers, and data and learning rate are functions of them: a branch sees what its parent would have.
"""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from train.command import UserError, explain_validation
from train.config import RunConfig, dump_run, load_run
from train.frozen import fingerprint
from train.run_directory import RunDirectory, write_json
from train.settings import Anneal, DataConfig

# What decides where an update leads, but for the learning rate. Kernels and layout may differ, as when resuming.
MUST_AGREE = ("seed", "engine", "precision", "model", "data", "optimizer", "batch_size")
PATHS = ("held_out", "tokenizer")  # of the data: the tokens themselves are compared by hash


def _compared(run: RunConfig, key: str) -> Any:
    content = run.model_dump(mode="json")[key]
    if key == "data":
        weights = [part.weight for part in run.data.train_sources]
        return {name: content[name] for name in content if name not in PATHS} | {"train": weights}
    if key == "optimizer":
        return {name: content[name] for name in content if name != "peak_lr"}
    return content


def check_parent(run: RunConfig, parent: RunDirectory) -> None:
    """UserError unless `run` may go on from the checkpoint of `parent` that it names."""
    assert run.branch_from
    step = run.branch_from.step
    origin = load_run(parent.run_json)
    if fingerprint(origin) != run.branch_from.fingerprint:
        raise UserError(
            f"{parent.path} has fingerprint {fingerprint(origin)}, branch_from names {run.branch_from.fingerprint}; "
            f"branch from the run that was meant, with python -m train branch"
        )
    for key in MUST_AGREE:
        own, parents = _compared(run, key), _compared(origin, key)
        if own == parents:
            continue
        if isinstance(own, dict):
            key = next(f"{key}.{name}" for name in own if own[name] != parents[name])
        raise UserError(f"a branch has the {key} of its parent {parent.path}; set it as there")
    if step not in parent.complete_steps():
        raise UserError(f"{parent.path} has no checkpoint of step {step}; it has {_listed(parent)}")


def _listed(run: RunDirectory) -> str:
    return ", ".join(map(str, run.complete_steps())) or "none"


def branch(
    parent_path: Path, out: Path, *, step: int, cooldown_steps: int, shape: Literal["linear", "cosine", "sqrt"]
) -> RunConfig:
    """Writes run.json of a cooldown: the parent's run up to `step`, then an anneal to zero.

    Args:
        parent_path: directory of the run to branch from.
        out: directory of the branch; its name is the run's.
        step: of a permanent checkpoint of the parent.
        cooldown_steps: updates until the learning rate is zero, which end the branch.
        shape: of the anneal.

    Raises:
        UserError: no such checkpoint, it lies in an anneal, or `out` is another run.
    """
    parent, origin = RunDirectory(parent_path), load_run(parent_path / "run.json")
    if step not in parent.complete_steps():
        raise UserError(f"{parent_path} has no checkpoint of step {step}; give one of {_listed(parent)}")
    anneal = origin.schedule.anneal
    if anneal and anneal.start_step < step:
        raise UserError(
            f"step {step} of {parent_path} lies in its anneal from step {anneal.start_step} on; branch at or before it"
        )
    last = step + cooldown_steps

    def seen_from_branch(path: str) -> str:
        return path if Path(path).is_absolute() else os.path.relpath(parent.resolve(path), out.absolute())

    changes = {
        "name": out.absolute().name,
        "data": _moved(origin.data, seen_from_branch),
        "schedule": origin.schedule.model_copy(update={"anneal": Anneal(start_step=step, shape=shape)}),
        "branch_from": {
            "run": os.path.relpath(parent_path.absolute(), out.absolute()),
            "step": step,
            "fingerprint": fingerprint(origin),
        },
        "start_from": None,
        "total_steps": last,
        "save_steps": (last,),
    }
    try:
        run = RunConfig.model_validate(dict(origin) | changes)
    except ValidationError as error:
        raise explain_validation("the branch", error) from None
    run_json = out / "run.json"
    if run_json.exists() and load_run(run_json) != run:
        raise UserError(f"{out} holds another configuration; give the branch another directory")
    out.mkdir(parents=True, exist_ok=True)
    write_json(run_json, dump_run(run))
    return run


def _moved(data: DataConfig, path: Any) -> DataConfig:
    """The data as seen from another directory."""
    train = data.train
    moved = (
        path(train)
        if isinstance(train, str)
        else tuple(part.model_copy(update={"source": path(part.source)}) for part in train)
    )
    return data.model_copy(update={"train": moved, "held_out": path(data.held_out), "tokenizer": path(data.tokenizer)})
