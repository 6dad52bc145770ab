"""Recipes: an ablation as a plain Python function that returns a Study.

A variant is a function with the one thing that differs as its argument. `parts` holds what they share.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from study.own_text import Asked
from study.recipes.changed import on_text, with_study_settings
from study.recipes.demo import tiny, tiny_smoke
from study.recipes.olmo2 import olmo2_1b_lr, olmo2_7b_lr, olmo2_7b_lr_cosine300b, olmo2_30m_lr, olmo2_190m_lr
from study.recipes.parts import learning_rate_name
from study.recipes.pythia import (
    pythia_70m_kumar,
    pythia_160m_budgets,
    pythia_160m_lawa,
    pythia_160m_lr,
    pythia_160m_schedules,
    pythia_160m_weight_decay,
)
from study.recipes.trajectory import TRAJECTORY, Released, trajectory
from study.settings import Study
from train.command import UserError

__all__ = ["RECIPES", "TRAJECTORY", "Released", "learning_rate_name", "recipe_names", "resolve", "tiny"]

Profiles = dict[str, Callable[[], Study]]  # profile -> function; "full" is the study itself


def _profiles(recipe: Callable[[bool], Study]) -> Profiles:
    return {"full": partial(recipe, False), "smoke": partial(recipe, True)}


# The recipe `trajectory` is not among them: it takes a source.
RECIPES: dict[str, Profiles] = {
    "tiny": {"full": tiny, "smoke": tiny_smoke},
    "olmo2-7b-lr": _profiles(olmo2_7b_lr),
    "olmo2-7b-lr-cosine300b": _profiles(olmo2_7b_lr_cosine300b),
    "olmo2-1b-lr": _profiles(olmo2_1b_lr),
    "olmo2-190m-lr": _profiles(olmo2_190m_lr),
    "olmo2-30m-lr": _profiles(olmo2_30m_lr),
    "pythia-160m-lr": _profiles(pythia_160m_lr),
    "pythia-160m-schedules": _profiles(pythia_160m_schedules),
    "pythia-160m-weight-decay": _profiles(pythia_160m_weight_decay),
    "pythia-160m-budgets": _profiles(pythia_160m_budgets),
    "pythia-160m-lawa": _profiles(pythia_160m_lawa),
    "pythia-70m-kumar": _profiles(pythia_70m_kumar),
}


def recipe_names() -> tuple[str, ...]:
    """Everything that `resolve` takes."""
    return (*RECIPES, TRAJECTORY)


def resolve(
    recipe: str,
    profile: str,
    settings: tuple[str, ...] = (),
    released: Released | None = None,
    asked: Asked | None = None,
    root: Path = Path("runs"),
) -> Study:
    """Return the study of a recipe's name and profile, its runs changed by settings, on the text that is asked for.

    Settings and text stand in the name of the study; its runs keep theirs.

    >>> resolve("tiny", "full", ("engine=deepspeed",)).name
    'tiny-engine=deepspeed'

    Args:
        recipe: its name.
        profile: full or smoke.
        settings: key.path=value of run.json.
        released: of the recipe `trajectory`.
        asked: --text; None: the recipe's own text.
        root: directory of studies; one of the name that is there says where its text came from.

    Raises:
        UserError: there is no such recipe or profile (the message lists what there is), a setting or the text does not
            fit.
    """
    study = _resolved(recipe, profile, settings, released, measured_on=asked is not None)
    return on_text(study, asked, root) if asked else study


def _resolved(
    recipe: str, profile: str, settings: tuple[str, ...], released: Released | None, measured_on: bool
) -> Study:
    if recipe == TRAJECTORY:
        if settings:
            raise UserError("--set changes runs that are trained, a trajectory has none; leave it out")
        if released is None:
            raise UserError(
                "trajectory needs a released model; give --source, such as allenai/OLMo-2-1124-7B, or a directory of "
                "revisions"
            )
        return trajectory(released, profile, measured_on)
    if released is not None:
        raise UserError(f"--source, --every, --stage and --family belong to {TRAJECTORY}, not to {recipe}")
    if recipe not in RECIPES:
        raise UserError(f"no recipe '{recipe}'; take one of: {', '.join(recipe_names())}")
    if profile not in RECIPES[recipe]:
        raise UserError(f"recipe {recipe} has no profile '{profile}'; take one of: {', '.join(RECIPES[recipe])}")
    study = RECIPES[recipe][profile]()
    return with_study_settings(study, settings) if settings else study
