"""A recipe in a file of the user's: `python -m study run ./mine.py`."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from traceback import extract_tb

from pydantic import ValidationError

from base.errors import UserError, explain_validation
from dynamics.recipes.parts import Recipe
from study.definition import Study

HOW = "write one: a function NAME(*, smoke=False) that returns study(...), with @recipe above it"


def is_own(name: str) -> bool:
    """Return whether a name is that of a file with a recipe."""
    return name.endswith(".py")


def own_recipe(path: Path) -> Recipe:
    """Return the one recipe that a file defines, by the decorator `dynamics.recipes.parts.recipe`.

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
