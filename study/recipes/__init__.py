"""Recipes: an ablation as a plain Python function that returns a Study.

A variant is a function with the one thing that differs as its argument. `parts` holds what they share.
"""

from collections.abc import Callable
from functools import partial

from pydantic import ValidationError

from study.recipes.demo import tiny, tiny_smoke
from study.recipes.olmo2 import olmo2_1b_lr, olmo2_7b_lr, olmo2_7b_lr_cosine300b, olmo2_190m_lr
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
from train.command import UserError, explain_validation
from train.config import RunConfig, with_settings
from train.frozen import fingerprint

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


def resolve(recipe: str, profile: str, settings: tuple[str, ...] = (), released: Released | None = None) -> Study:
    """The study of a recipe's name and profile, with `key.path=value` settings applied to every run of it.

    The settings stand in the name of the study; its runs keep theirs. `released` belongs to the recipe `trajectory`.

    >>> resolve("tiny", "full", ("engine=deepspeed",)).name
    'tiny-engine=deepspeed'

    Raises:
        UserError: there is no such recipe or profile (the message lists what there is), or a setting does not fit.
    """
    if recipe == TRAJECTORY:
        if settings:
            raise UserError("--set changes runs that are trained, a trajectory has none; leave it out")
        if released is None:
            raise UserError(
                "trajectory needs a released model; give --source, such as allenai/OLMo-2-1124-7B, or a directory of "
                "revisions"
            )
        return trajectory(released, profile)
    if released is not None:
        raise UserError(f"--source, --every, --stage, --family and --text belong to {TRAJECTORY}, not to {recipe}")
    if recipe not in RECIPES:
        raise UserError(f"no recipe '{recipe}'; take one of: {', '.join(recipe_names())}")
    if profile not in RECIPES[recipe]:
        raise UserError(f"recipe {recipe} has no profile '{profile}'; take one of: {', '.join(RECIPES[recipe])}")
    study = RECIPES[recipe][profile]()
    return _changed(study, settings) if settings else study


def _changed(study: Study, settings: tuple[str, ...]) -> Study:
    """The study with settings applied to every run; a branch names its changed parent."""
    changed: dict[str, RunConfig] = {}
    suffix = ""
    for run in study.trained:
        new = with_settings(run, list(settings))
        suffix = new.name.removeprefix(run.name)
        branch_from = run.branch_from
        if branch_from:
            parent = changed[study.parent_of(run).name]
            branch_from = branch_from.model_copy(update={"fingerprint": fingerprint(parent)})
        changed[run.name] = new.model_copy(update={"name": run.name, "branch_from": branch_from})
    content = study.model_dump() | {
        "name": study.name + suffix,
        "settings": settings,
        "runs": [run.model_dump() for run in changed.values()],
    }
    try:
        return Study.model_validate(content)
    except ValidationError as error:
        raise explain_validation("--set", error) from None
