"""A recipe in a file of the user's: `python -m study run ./mine.py`."""

import importlib.util
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from pydantic import ValidationError

from base.errors import UserError, explain_validation
from study.definition import Study
from study.recipes.parts import Recipe

HOW = "write one: a function NAME(*, smoke=False) that returns study(...), with @recipe above it"


def is_own(name: str) -> bool:
    """Return whether a name is that of a file with a recipe."""
    return name.endswith(".py")


def own_recipe(path: Path) -> Recipe:
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
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever a program of the user's raises
        raise _refused(path, error) from error
    recipes = [
        value
        for value in vars(module).values()
        if isinstance(value, Recipe) and value.make.__module__ == module.__name__
    ]
    if len(recipes) != 1:
        names = ", ".join(recipe.make.__name__ for recipe in recipes)
        what = f"defines {len(recipes)} recipes ({names}), not one" if recipes else "has no recipe"
        raise UserError(f"{path} {what}; {'leave one' if recipes else HOW}")
    return _checked(path, recipes[0].make)


def _checked(path: Path, make: Callable[..., Study]) -> Recipe:
    """Return the recipe of a function, with errors that name its file."""

    @wraps(make)
    def checked(*, smoke: bool) -> Study:
        try:
            study = make(smoke=smoke)
        except UserError:
            raise
        except ValidationError as error:
            raise explain_validation(str(path), error) from None
        except Exception as error:  # whatever a program of the user's raises
            raise _refused(path, error) from error
        if not isinstance(study, Study):
            raise UserError(f"{path}: {make.__name__} returns no study; {HOW}")
        return study

    return Recipe(checked)


def _refused(path: Path, error: Exception) -> UserError:
    """Return the error with the line of the file that it came from."""
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    where = f"{path}, line {line}" if line else str(path)
    return UserError(f"{where}: {type(error).__name__}: {error}; correct the recipe")
