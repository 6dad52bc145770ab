"""The study that a name means: that of a recipe of the content, or of one in a file of the user's.

python -m study run tiny
python -m study run ./mine.py
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from traceback import extract_tb

from pydantic import ValidationError

from base.errors import UserError, explain_validation
from base.names import take_one_of
from study.content import recipe_places
from study.definition import Study
from study.recipes.changed import on_text, with_study_settings
from study.recipes.parts import PROFILES, Recipe
from study.text.own import TextOptions

HOW = "write one: a function NAME(*, smoke=False) that returns study(...), with @recipe above it"


def recipe_names() -> tuple[str, ...]:
    """Return all that `resolve` takes besides files."""
    return tuple(recipe_places())


def named_recipe(name: str) -> Recipe:
    """Return the recipe of a name; UserError for any other."""
    places = recipe_places()
    if name not in places:
        raise UserError(
            f"no recipe '{name}'; {take_one_of(name, places)}, or give a file FILE.py with one of"
            " yours"
        )
    recipe: Recipe = resolve_name(places[name])
    return recipe


def whole_recipes() -> list[str]:
    """Return the names of the recipes that are a study without any setting."""
    return [name for name in recipe_names() if not named_recipe(name).takes_settings]


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
    recipe = recipe_of_file(Path(name)) if is_recipe_file(name) else named_recipe(name)
    smoke = profile == "smoke"
    if recipe.takes_settings:
        study = recipe.make(smoke=smoke, settings=settings, on_text=text is not None)
    else:
        study = recipe(smoke=smoke)
        study = with_study_settings(study, settings) if settings else study
    return on_text(study, text, root) if text else study


def is_recipe_file(name: str) -> bool:
    """Return whether a name is that of a file with a recipe."""
    return name.endswith(".py")


def recipe_of_file(path: Path) -> Recipe:
    """Return the one recipe that a file defines, by the decorator `study.recipes.parts.recipe`.

    UserError where it cannot be imported, or defines none or several. The file is imported, so it
    can do what any program of the user can.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; give a .py file with a recipe")
    spec = importlib.util.spec_from_file_location(f"_own_{path.stem}", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look themselves up there
    with _refusing(path):
        spec.loader.exec_module(module)
    recipes = [
        value
        for value in vars(module).values()
        # A recipe that the file imports to build on is not the one that it defines.
        if isinstance(value, Recipe) and value.make.__module__ == module.__name__
    ]
    if len(recipes) != 1:
        names = ", ".join(recipe.make.__name__ for recipe in recipes)
        what = f"defines {len(recipes)} recipes ({names}), not one" if recipes else "has no recipe"
        raise UserError(f"{path} {what}; {'leave one' if recipes else HOW}")
    make = recipes[0].make

    @wraps(make)
    def checked(*, smoke: bool) -> Study:
        with _refusing(path):
            study = make(smoke=smoke)
        if not isinstance(study, Study):
            raise UserError(f"{path}: {make.__name__} does not return a study; {HOW}")
        return study

    return Recipe(checked)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Raise UserError, with the line of the file, for whatever a program of the user's raises."""
    try:
        yield
    except UserError:
        raise
    except ValidationError as error:
        raise explain_validation(str(path), error) from None
    except Exception as error:  # of the user's program: any kind, always an error of the recipe
        lines = [getattr(error, "lineno", None)]
        lines += [
            frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        where = f"{path}, line {lines[-1]}" if lines[-1] else str(path)
        raise UserError(f"{where}: {type(error).__name__}: {error}; correct the recipe") from error
