"""The content that the engine runs on: recipes, figures, claims, tables and commands of packages.

Each package in PACKAGES has a module `content` with one value, CONTENT. It names functions by their
place, 'module:name', so that each is imported where it is used and not before.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import resolve_name
from typing import Any, Literal

PACKAGES = ("dynamics",)
Kind = Literal["figures", "claims", "sentences", "tables", "commands"]


@dataclass(frozen=True)
class Content:
    """The places of what one package brings, each in the order in which it is shown.

    Attributes:
        paper: whose claims they are.
        recipes: `study.recipes.parts.Recipe`, called as their function with hyphens.
        presets: `study.recipes.presets.Preset`, likewise.
        figures: `study.figures.figure.Figure`.
        claims: `study.claims.verdict.Claim`.
        sentences: of the report; from `Evidence` to text, or None.
        tables: of the report; from `Evidence` to a list of `study.report.cells.Table`.
        commands: functions for typer, in light modules: each start of `python -m study` imports
            them.
    """

    paper: str
    recipes: tuple[str, ...] = ()
    presets: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


def contents() -> Iterator[Content]:
    """Yield what each package brings."""
    for package in PACKAGES:
        yield import_module(f"{package}.content").CONTENT


def loaded(kind: Kind) -> list[Any]:
    """Return everything of a kind, imported now."""
    return [resolve_name(place) for content in contents() for place in getattr(content, kind)]


def modules() -> list[str]:
    """Return the modules of figures, claims and tables, for a process that imports ahead."""
    places = [
        place
        for content in contents()
        for place in (*content.figures, *content.claims, *content.sentences, *content.tables)
    ]
    return list(dict.fromkeys(place.partition(":")[0] for place in places))


def recipe_places() -> dict[str, str]:
    """Return the places of the recipes by the names that commands take."""
    return _by_name(place for content in contents() for place in content.recipes)


def preset_places() -> dict[str, str]:
    """Return the places of the presets by the names that `--set settings=NAME` takes."""
    return _by_name(place for content in contents() for place in content.presets)


def _by_name(places: Iterable[str]) -> dict[str, str]:
    return {with_hyphens(place.partition(":")[2]): place for place in places}


def with_hyphens(name: str) -> str:
    """Return the name of a function as commands take it."""
    return name.replace("_", "-")


def described(function: Callable[..., object]) -> str:
    """Return the first line of a function's docstring, or else its name."""
    lines = (function.__doc__ or "").strip().splitlines()
    return lines[0].rstrip(".") if lines else with_hyphens(function.__name__)
