"""Colours, markers and line styles of the runs: the same in every figure of a study.

The colours are a sequence that stays readable without colour vision and in grey. The runs are
ordered by what the study varies, so are the colours.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.colors import to_hex

from study.definition import Study
from study.results.summary import in_order

SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")


@dataclass(frozen=True)
class Look:
    """One run in every figure."""

    label: str
    colour: str
    shape: str


@dataclass(frozen=True)
class Runs:
    """The looks of the runs by name, the heading of their legend, and the field that names them."""

    heading: str
    looks: dict[str, Look]
    field: str = "run"

    def _encoding(self, values: list[Any]) -> dict[str, Any]:
        scale = {"domain": [look.label for look in self.looks.values()], "range": values}
        return {"field": self.field, "type": "nominal", "title": self.heading, "scale": scale}

    @property
    def colour(self) -> dict[str, Any]:
        """The colour of a row's run."""
        return self._encoding([look.colour for look in self.looks.values()])

    @property
    def shape(self) -> dict[str, Any]:
        """The marker of a row's run."""
        return self._encoding([look.shape for look in self.looks.values()])


def colours(count: int) -> list[str]:
    """Return colours from dark violet to orange; yellow, unreadable on white, is left out."""
    scale = matplotlib.colormaps["plasma"]
    return [to_hex(scale(0.02 + 0.76 * index / max(count - 1, 1))) for index in range(count)]


def looks_for(labels: Iterable[str]) -> list[Look]:
    """Return a look for each label, in order."""
    names = list(labels)
    shapes = [SHAPES[index % len(SHAPES)] for index in range(len(names))]
    return [Look(*one) for one in zip(names, colours(len(names)), shapes, strict=True)]


def runs_of(study: Study) -> Runs:
    """Return the looks of a study's runs, in order.

    Where what is varied has groups, the colour is that of the value and the marker that of the
    group.
    """
    runs, varied = in_order(study), study.varied
    looks = dict(zip((run.name for run in runs), looks_for(map(study.label_of, runs)), strict=True))
    if varied and len(set(varied.groups.values())) > 1:
        values = list(dict.fromkeys(varied.values.get(run.name) for run in runs))
        groups = list(dict.fromkeys(varied.groups.get(run.name, "") for run in runs))
        for name, look in looks.items():
            colour = colours(len(values))[values.index(varied.values.get(name))]
            shape = SHAPES[groups.index(varied.groups.get(name, "")) % len(SHAPES)]
            looks[name] = replace(look, colour=colour, shape=shape)
    return Runs(study.heading, looks)
