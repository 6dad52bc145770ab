"""Cooldowns of runs that a study has trained at a high rate: their cost, and a recipe of them."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from base.errors import UserError, explain_validation
from base.files import replaced_file
from base.names import take_one_of
from study.axes import amount_name
from study.definition import Study
from study.machine.disk import GB, needed_bytes
from study.recipes.parts import annealed, spread
from study.recipes.shown import gpu_hours, trained_tokens
from train.run.config import RunConfig

SAVES = 2  # checkpoints of a cooldown: slices go through the last two
SHARE = 10  # a cooldown takes a tenth of the steps before it (arXiv 2405.18392)
RECIPE = '''\
"""Cooldowns of {runs} of {name}, beside what the study holds.

python -m study run {path} --root {root}
"""

from pathlib import Path

from dynamics.choices.cooldowns import with_cooldowns
from study.definition import Study, load_study
from study.recipes.parts import recipe

ROOT = Path({absolute})


@recipe
def {function}(*, smoke: bool = False) -> Study:
    """{description}"""
    study = load_study(ROOT / {quoted})
    return with_cooldowns(study, {run_names}, {steps}, {length})
'''


def with_cooldowns(
    study: Study, runs: Sequence[str], steps: Sequence[int], length: int | None = None
) -> Study:
    """Return the study with a linear cooldown to 0 of each run from each of these steps.

    Cooldowns that it already has stay as they are.

    Args:
        study: one that has the runs.
        runs: names of runs that are not branches.
        steps: checkpoints with optimizer state, before any anneal, that the cooldowns start from.
        length: steps of each; by default a tenth of those before it.

    Raises:
        UserError: there is no such run, or it has no such checkpoint before its anneal.
    """
    added = [
        _cooldown(_parent(study, name), step, length or max(SAVES, step // SHARE))
        for name in runs
        for step in steps
    ]
    # The name holds parent, start and end, so an equal name is the same cooldown.
    names = {run.name for run in study.runs}
    # Validated anew as a whole, since the checks of a study go over all of its runs.
    content = [run.model_dump() for run in (*study.runs, *added)]
    fresh = [each for each in content[len(study.runs) :] if each["name"] not in names]
    try:
        return Study.model_validate(
            study.model_dump() | {"runs": [*content[: len(study.runs)], *fresh]}
        )
    except ValidationError as error:
        raise explain_validation("--steps", error) from None


def _parent(study: Study, name: str) -> RunConfig:
    run = next((run for run in study.trained if run.name == name), None)
    if run is None:
        names = [run.name for run in study.trained]
        raise UserError(f"{study.name} trains no run {name}; {take_one_of(name, names)}")
    if run.branch_from:
        parent = study.parent_of(run).name
        raise UserError(f"{name} is a branch itself; give its parent, {parent}")
    return run


def _cooldown(parent: RunConfig, step: int, length: int) -> RunConfig:
    # After the start of its own anneal the rate of the parent is no longer high.
    anneal = parent.schedule.anneal
    if anneal and step > anneal.start_step:
        raise UserError(
            f"{parent.name} anneals from step {anneal.start_step} on; give --steps up to there, not"
            f" {step}"
        )
    end = step + length
    name = f"{parent.name}-cooldown{step}-{end}"
    try:
        return annealed(parent, name, start=step, save_steps=spread(step, end, SAVES))
    except ValidationError as error:
        raise explain_validation("--steps", error) from None


def cost(study: Study, extended: Study) -> Iterator[str]:
    """Yield the cooldowns that a study is extended by, and their cost in words."""
    names = {run.name for run in study.runs}
    added = [run for run in extended.trained if run.name not in names]
    for run in added:
        assert run.branch_from
        start = run.branch_from.step
        tokens = run.total_tokens - run.tokens_at(start)
        yield f"{run.name}: {run.total_steps - start} steps, {amount_name(tokens).upper()} tokens"
    more = trained_tokens(extended) - trained_tokens(study)
    # As branches they train from a checkpoint on; as whole runs they would train all of it.
    alone = sum(run.total_tokens for run in added)
    hours = gpu_hours(extended).expected - gpu_hours(study).expected
    disk = sum(needed_bytes(extended).values()) - sum(needed_bytes(study).values())
    yield (
        f"{len(added)} cooldown{'s' * (len(added) > 1)}: {amount_name(more).upper()} tokens,"
        f" {hours:.2g} H100-hours of training (estimate), {disk / GB:,.3g} GB; as whole runs they"
        f" would train on {amount_name(alone).upper()} tokens"
    )


def write_recipe(
    path: Path,
    root: Path,
    study: Study,
    runs: Sequence[str],
    steps: Sequence[int],
    length: int | None,
) -> None:
    """Write a recipe of the study with its cooldowns, which has the study's name and directory.

    Raises:
        UserError: the path exists or is not a .py file, or no function can have the study's name.
    """
    function = study.name.replace("-", "_")
    # A recipe that somebody wrote is never overwritten.
    if path.suffix != ".py" or path.exists():
        raise UserError(f"{path} exists already or is not a .py file; give a new one")
    if not function.isidentifier() or "_" in study.name:
        raise UserError(
            f"a recipe is a function and cannot have the name {study.name}; leave out --write, and"
            " add the branches to the study's own recipe"
        )
    content = RECIPE.format(
        runs=", ".join(runs),
        name=study.name,
        path=path,
        root=root,
        absolute=json.dumps(str(root.absolute())),
        quoted=json.dumps(study.name),
        function=function,
        description=study.description.replace("\\", "").replace('"', "'"),
        run_names=json.dumps(list(runs)),
        steps=json.dumps(list(steps)),
        length=length,
    )
    with replaced_file(path) as aside:
        aside.write_text(content)
