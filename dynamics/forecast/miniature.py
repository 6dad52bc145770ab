"""The miniature cooldown: a branch that anneals within 1% of the steps, as a probe of a long one.

It costs 1% of the training so far, and shows how the error reacts to a rate that falls.
"""

from collections.abc import Iterable

from study.axes import AnyRun
from train.run.config import RunConfig

SHARE = 0.01  # of the steps so far: far below the 10% to 20% of a cooldown that trains the model


def miniature_steps(start: int) -> int:
    """Return the length of a miniature cooldown that starts at step `start`."""
    return max(1, round(SHARE * start))


def is_miniature(run: AnyRun) -> bool:
    """Return whether a run is a branch that anneals from its start, within 1% of the steps."""
    if not isinstance(run, RunConfig) or not run.branch_from or not run.schedule.anneal:
        return False
    start = run.branch_from.step
    length = run.total_steps - start
    return run.schedule.anneal.start_step == start and length <= miniature_steps(start)


def miniature(parent: RunConfig, step: int) -> RunConfig:
    """Return the miniature cooldown of a run at a step of which it keeps the state, for a recipe.

    It has one checkpoint, at its end.
    """
    from dynamics.recipes.parts import annealed

    name = f"{parent.name}-miniature{step}"
    return annealed(parent, name, start=step, save_steps=(step + miniature_steps(step),))


def miniature_of(runs: Iterable[RunConfig], parent: str, step: int) -> RunConfig | None:
    """Return the miniature cooldown of a run at a step; None where the study has none."""
    for run in runs:
        origin = run.branch_from
        if origin and is_miniature(run) and (origin.run, origin.step) == (f"../{parent}", step):
            return run
    return None
