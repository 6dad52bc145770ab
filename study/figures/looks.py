"""Colours, markers and line styles of the runs: the same in every figure of a study.

The colours are a sequence that stays readable without colour vision and in grey. The runs are
ordered by what the study varies, so are the colours. Runs that differ in their seed alone look the
same. A control has the colour of what it is compared with, and dashed lines.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.colors import to_hex

from base.grouping import grouped
from study.definition import Study
from study.results.summary import in_order

SOLID, DASHED = [1, 0], [5, 3]
SHAPES = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross")


@dataclass(frozen=True)
class Look:
    """One run in every figure; `group` is the label that it shares with its replicates."""

    label: str
    colour: str
    shape: str
    group: str
    is_control: bool = False


@dataclass(frozen=True)
class Runs:
    """The looks of the runs by name, the heading of their legend, and the field that names them."""

    heading: str
    looks: dict[str, Look]
    field: str = "run"

    @property
    def groups(self) -> dict[str, list[Look]]:
        """The looks by the label of their group."""
        return grouped(self.looks.values(), lambda look: look.group)

    def _encoding(self, values: list[Any]) -> dict[str, Any]:
        scale = {"domain": [look.label for look in self.looks.values()], "range": values}
        # the legend has an entry for each group, under the label of its first run
        entries = {looks[0].label: group for group, looks in self.groups.items()}
        legend = {"values": list(entries), "labelExpr": f"({json.dumps(entries)})[datum.label]"}
        encoding = {"field": self.field, "type": "nominal", "title": self.heading, "scale": scale}
        # stated always: the dashes, which share it, have none
        return encoding | {"legend": legend}

    @property
    def colour(self) -> dict[str, Any]:
        """The colour of a row's run."""
        return self._encoding([look.colour for look in self.looks.values()])

    @property
    def shape(self) -> dict[str, Any]:
        """The marker of a row's run."""
        return self._encoding([look.shape for look in self.looks.values()])

    @property
    def dash(self) -> dict[str, Any]:
        """The dash pattern of a row's line; none where no run is a control."""
        looks = self.looks.values()
        if not any(look.is_control for look in looks):
            return {}
        dashes = self._encoding([DASHED if look.is_control else SOLID for look in looks])
        # the markers of the legend say which are controls
        return dashes | {"legend": None}

    def group_of(self, row: dict[str, Any]) -> str:
        """Return the group of a row of a figure."""
        labels = {look.label: look.group for look in self.looks.values()}
        return labels[row[self.field]]


def colours(count: int) -> list[str]:
    """Return colours from dark violet to orange; what has a contrast below 3 on white is left out.

    That is the least of graphics by WCAG 2.1, criterion 1.4.11.
    """
    scale = matplotlib.colormaps["plasma"]
    return [to_hex(scale(0.02 + 0.62 * index / max(count - 1, 1))) for index in range(count)]


def looks_for(labels: Iterable[str]) -> list[Look]:
    """Return a look for each label, in order."""
    names = list(labels)
    shapes = [SHAPES[index % len(SHAPES)] for index in range(len(names))]
    return [Look(*parts) for parts in zip(names, colours(len(names)), shapes, names, strict=True)]


def runs_of(study: Study) -> Runs:
    """Return the looks of a study's runs, in order.

    Where what is varied has groups, the colour is that of the value and the marker that of the
    group.
    """
    runs, varied = in_order(study), study.varied
    groups = {run.name: study.group_of(run).label for run in runs}
    of_groups = {look.label: look for look in looks_for(dict.fromkeys(groups.values()))}
    looks = {
        run.name: replace(
            of_groups[groups[run.name]],
            label=study.label_of(run),
            is_control=run.name in study.controls,
        )
        for run in runs
    }
    if varied and len(set(varied.groups.values())) > 1:
        values = list(dict.fromkeys(varied.values.get(run.name) for run in runs))
        others = list(dict.fromkeys(varied.groups.get(run.name, "") for run in runs))
        for name, look in looks.items():
            colour = colours(len(values))[values.index(varied.values.get(name))]
            shape = SHAPES[others.index(varied.groups.get(name, "")) % len(SHAPES)]
            looks[name] = replace(look, colour=colour, shape=shape)
    return Runs(study.heading, looks)
