"""Recipes: an ablation as a plain Python function that returns a Study.

To write one of your own, see `dynamics.recipes.demo`, and `dynamics.recipes.own` for how a file of
yours is read; `dynamics.recipes.parts` has what they share.
"""

from pathlib import Path

from base.errors import UserError
from base.names import take_one_of
from dynamics.recipes.changed import on_text, with_study_settings
from dynamics.recipes.demo import tiny
from dynamics.recipes.olmo2 import olmo2_7b_lr, olmo2_7b_lr_cosine300b
from dynamics.recipes.olmo2_sizes import olmo2_1b_lr, olmo2_30m_lr, olmo2_190m_lr
from dynamics.recipes.own import is_own, own_recipe
from dynamics.recipes.parts import PROFILES, Recipe, learning_rate_name
from dynamics.recipes.pythia import (
    pythia_160m_decay,
    pythia_160m_lr,
    pythia_160m_schedules,
    pythia_160m_weight_decay,
)
from dynamics.recipes.pythia_cooldowns import (
    pythia_70m_kumar,
    pythia_160m_budgets,
    pythia_160m_lawa,
)
from dynamics.recipes.trajectory import TRAJECTORY, released_of, trajectory
from study.definition import Study
from study.text.own import TextOptions

__all__ = [
    "PROFILES",
    "RECIPES",
    "TRAJECTORY",
    "is_own",
    "learning_rate_name",
    "own_recipe",
    "recipe_names",
    "resolve",
    "tiny",
]

# The recipe `trajectory` is not among them: it takes a source.
RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        *(tiny, olmo2_7b_lr, olmo2_7b_lr_cosine300b, olmo2_1b_lr, olmo2_190m_lr, olmo2_30m_lr),
        *(pythia_160m_lr, pythia_160m_schedules, pythia_160m_weight_decay, pythia_160m_budgets),
        *(pythia_160m_decay, pythia_160m_lawa, pythia_70m_kumar),
    )
}


def recipe_names() -> tuple[str, ...]:
    """Return all that `resolve` takes besides files."""
    return (*RECIPES, TRAJECTORY)


def resolve(
    name: str,
    profile: str = "full",
    settings: tuple[str, ...] = (),
    text: TextOptions | None = None,
    root: Path = Path("runs"),
) -> Study:
    """Return the study of a recipe, its runs changed by settings, on the text that is asked for.

    Settings and text are part of the study's name; its runs keep theirs. A study of the name below
    the root says where its text came from.

    >>> resolve("tiny", "full", ("engine=deepspeed",)).name
    'tiny-engine=deepspeed'
    """
    if profile not in PROFILES:
        raise UserError(
            f"recipe {name} has no profile '{profile}'; {take_one_of(profile, PROFILES)}"
        )
    if name == TRAJECTORY:
        study = trajectory(released_of(settings), profile, text is not None)
    else:
        recipe = own_recipe(Path(name)) if is_own(name) else RECIPES.get(name)
        if recipe is None:
            raise UserError(
                f"no recipe '{name}'; {take_one_of(name, recipe_names())}, or give a file FILE.py"
                " with one of yours"
            )
        study = recipe(smoke=profile == "smoke")
        study = with_study_settings(study, settings) if settings else study
    return on_text(study, text, root) if text else study
