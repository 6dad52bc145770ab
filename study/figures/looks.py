"""Colours, markers and line styles of the runs: the same in every figure of a study.

The colours are a sequence that stays readable without colour vision and in grey. The runs are
ordered by what the study varies, so are the colours. Runs that differ in their seed alone look the
same. A control has dashed lines, and colour and marker of what it is compared with; it is black
where that are several values. Markers differ where a second factor does, or where colours are too
many to be distinguished.

Several released models have a colour each, which all of their stages share. Runs that leave one
stage together, such as those that a soup takes in, are thin; the soup is a star.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
from matplotlib.colors import to_hex

from base.grouping import grouped
from study.axes import MODEL, Value, Varied
from study.definition import Study
from study.released import ReleasedRun
from study.results.summary import in_order

SOLID, DASHED = [1, 0], [5, 3]
TRUNK = "#1c1c1c"  # of a run at a constant rate that runs of several values are compared with
LEGEND_WIDTH, LABEL_WIDTH, LETTER_WIDTH = 640, 44, 6.4  # pixels
SHAPES = (
    *("circle", "square", "diamond", "triangle-up", "triangle-down", "cross"),
    *("triangle-right", "triangle-left"),
)
MOST_COLOURS = 5  # with one marker for all
STAR = "M0,-2L.46,-.62L1.9,-.62L.72,.24L1.18,1.62L0,.76L-1.18,1.62L-.72,.24L-1.9,-.62L-.46,-.62Z"
SOUP = "soup: an average of weights"  # entry of the legend; no run has that label
GREY = "#777777"
# Symbols of the legend: a marker on its line, as paths about the origin, and the room they take.
STROKES = {
    False: "M-3,-.22H-1.1V.22H-3ZM1.1,-.22H3V.22H1.1Z",
    True: "M-3,-.22H-2.4V.22H-3ZM-1.8,-.22H-1.1V.22H-1.8Z"
    "M1.1,-.22H1.8V.22H1.1ZM2.4,-.22H3V.22H2.4Z",
}
LEGEND = {"labelOffset": 12, "titlePadding": 14, "columnPadding": 18}  # pixels
NOBODY = "no run"
MARKERS = {
    "circle": "M-.9,0A.9,.9,0,1,1,.9,0A.9,.9,0,1,1,-.9,0Z",
    "square": "M-.8,-.8H.8V.8H-.8Z",
    "diamond": "M0,-1L.8,0L0,1L-.8,0Z",
    "triangle-up": "M0,-.9L.9,.8H-.9Z",
    "triangle-down": "M0,.9L-.9,-.8H.9Z",
    "cross": "M-.9,-.3H-.3V-.9H.3V-.3H.9V.3H.3V.9H-.3V.3H-.9Z",
    "triangle-right": "M.9,0L-.8,.9V-.9Z",
    "triangle-left": "M-.9,0L.8,-.9V.9Z",
}
WIDE, THIN = 1.6, 0.8  # pixels of a line


@dataclass(frozen=True)
class Look:
    """One run in every figure.

    Attributes:
        label: its own.
        colour, shape: of its marks.
        group: the label that it shares with its replicates.
        entry: the one that it has in the legend, shared by all stages of a released model.
        is_dashed, is_thin: how its lines are drawn.
    """

    label: str
    colour: str
    shape: str
    group: str
    entry: str
    is_dashed: bool = False
    is_thin: bool = False

    @property
    def symbol(self) -> str:
        """The marker on its line, as the legend has it; a path."""
        return STROKES[self.is_dashed] + MARKERS.get(self.shape, self.shape)


def _columns(labels: list[str]) -> int:
    """Return how many labels are side by side above two panels: all, or in columns of one width."""
    widths = [LABEL_WIDTH + LETTER_WIDTH * len(label) for label in labels]
    return len(labels) if sum(widths) <= LEGEND_WIDTH else int(LEGEND_WIDTH // max(widths)) or 1


@dataclass(frozen=True)
class Runs:
    """The looks of the runs by name, the heading of their legend, and the field that names them."""

    heading: str
    looks: dict[str, Look]
    field: str = "run"

    @property
    def undashed(self) -> "Runs":
        """The same with solid lines, where dashes mean something else."""
        looks = {name: replace(look, is_dashed=False) for name, look in self.looks.items()}
        return replace(self, looks=looks)

    @property
    def needs_dashes(self) -> bool:
        """Some runs differ from others in their dashes alone."""
        kinds = {(look.colour, look.shape, look.is_dashed) for look in self.looks.values()}
        return len({(colour, shape) for colour, shape, _ in kinds}) < len(kinds)

    @property
    def groups(self) -> dict[str, list[Look]]:
        """The looks by their entry in the legend."""
        return grouped(self.looks.values(), lambda look: look.entry)

    def _scale(self, values: list[Any], of_soups: Any) -> dict[str, Any]:
        has_soups = any(look.shape == STAR for look in self.looks.values())
        soups = {SOUP: of_soups} if has_soups else {}
        names = [look.label for look in self.looks.values()]
        return {"domain": [*names, *soups], "range": [*values, *soups.values()]}

    def _encoding(self, scale: dict[str, Any], legend: dict[str, Any] | None) -> dict[str, Any]:
        field = {"field": self.field, "type": "nominal", "title": self.heading}
        return field | {"scale": scale, "legend": legend}

    @property
    def colour(self) -> dict[str, Any]:
        """The colour of a row's run, with the legend, whose symbols have marker and dashes."""
        scale = self._scale([look.colour for look in self.looks.values()], GREY)
        # the legend has each entry once, under the label of its first run
        first = {looks[0].label: looks[0] for looks in self.groups.values()}
        entries = {label: look.entry for label, look in first.items()}
        symbols = {label: look.symbol for label, look in first.items()}
        if SOUP in scale["domain"]:
            entries[SOUP], symbols[SOUP] = SOUP, STAR
        symbol = {"value": {"expr": f"({json.dumps(symbols)})[datum.value]"}}
        legend: dict[str, Any] = {
            "values": list(entries),
            "labelExpr": f"({json.dumps(entries)})[datum.label]",
            "encoding": {"symbols": {"shape": symbol}},
            "columns": _columns(list(entries.values())),
        }
        return self._encoding(scale, legend | LEGEND)

    def _unnamed(self, values: list[Any], of_soups: Any, **kind: str) -> dict[str, Any]:
        scale: dict[str, Any] = self._scale(values, of_soups) | kind
        # One name more: Vega-Lite makes one legend of equal domains, and would draw its symbols.
        scale["domain"].append(NOBODY)
        scale["range"].append(values[0])
        return self._encoding(scale, None)

    @property
    def shape(self) -> dict[str, Any]:
        """The marker of a row's run."""
        return self._unnamed([look.shape for look in self.looks.values()], STAR)

    @property
    def dash(self) -> dict[str, Any]:
        """The dash pattern of a row's line; none where all are solid."""
        looks = self.looks.values()
        if not any(look.is_dashed for look in looks):
            return {}
        return self._unnamed([DASHED if look.is_dashed else SOLID for look in looks], SOLID)

    @property
    def width(self) -> dict[str, Any]:
        """The width of a row's line; none where all are equally wide."""
        looks = self.looks.values()
        if not any(look.is_thin for look in looks):
            return {}
        # else the range would be its two ends, and widths lie evenly between
        kind = {"type": "ordinal"}
        return self._unnamed([THIN if look.is_thin else WIDE for look in looks], WIDE, **kind)

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
    # So many colours are too alike, and markers tell the rest.
    markers = SHAPES if len(names) > MOST_COLOURS else SHAPES[:1]
    shapes = [markers[index % len(markers)] for index in range(len(names))]
    parts = zip(names, colours(len(names)), shapes, strict=True)
    return [Look(name, colour, shape, name, name) for name, colour, shape in parts]


def runs_of(study: Study) -> Runs:
    """Return the looks of a study's runs, in order.

    Where what is varied has groups, the colour is that of the value and the marker that of the
    other factors, unless most groups have the same value. Controls look like what they are compared
    with, but for their dashes.
    """
    runs, varied = in_order(study), study.varied
    groups = {run.name: study.group_of(run).label for run in runs}
    of_groups = {look.label: look for look in looks_for(dict.fromkeys(groups.values()))}
    looks = {
        run.name: replace(
            of_groups[groups[run.name]],
            label=study.label_of(run),
            is_dashed=run.name in study.controls,
        )
        for run in runs
    }
    released = [run for run in runs if isinstance(run, ReleasedRun)]
    looks |= {run.name: _released(looks[run.name], run, released) for run in released}
    if varied and len(set(varied.groups.values())) > 1 and not _is_crowded(study, varied):
        values = list(dict.fromkeys(varied.values.get(run.name) for run in runs))
        compared = {of.name: run.name for run in runs if (of := study.control_of(run))}
        # A control is dashed already: its marker is that of a run that is compared with it.
        marked = {run.name: compared.get(run.name, run.name) for run in runs}
        others = list(dict.fromkeys(varied.groups.get(name, "") for name in marked.values()))
        for name, look in looks.items():
            colour = colours(len(values))[values.index(varied.values.get(name))]
            shape = SHAPES[others.index(varied.groups.get(marked[name], "")) % len(SHAPES)]
            looks[name] = replace(look, colour=colour, shape=shape)
    looks |= {name: replace(looks[name], colour=TRUNK) for name in _trunks(study)}
    # Several models share a colour over their stages, which the legend does not name.
    heading = study.axes[0].name if study.axes[0].key == MODEL else study.heading
    return Runs(heading, looks)


def _is_crowded(study: Study, varied: Varied) -> bool:
    """Return whether most groups have the same value, whose colour would be that of nearly all.

    Not where these are more than markers: so many colours are too alike.
    """
    places = {
        (value, varied.groups.get(name, ""))
        for name, value in varied.values.items()
        if name not in study.controls
    }
    most = max(Counter(value for value, _ in places).values(), default=0)
    return 2 < most <= len(SHAPES) and 2 * most > len(places)


def _released(look: Look, run: ReleasedRun, runs: Sequence[ReleasedRun]) -> Look:
    """Return the look of a stage: in that of its model where there are several of these."""
    models = list(dict.fromkeys(each.model for each in runs))
    if len(models) > 1:
        of_model = looks_for(models)[models.index(run.model)]
        look = replace(look, colour=of_model.colour, shape=of_model.shape, entry=run.model)
    if run.average_of:
        is_soup = len(run.revisions) == 1
        return replace(look, shape=STAR if is_soup else look.shape, is_dashed=not is_soup)
    siblings = [each for each in runs if each.parent == run.parent]
    return replace(look, is_thin=run.parent is not None and len(siblings) > 1)


def _trunks(study: Study) -> list[str]:
    """Return the controls of runs with different values: they have the colour of none."""
    values = study.varied.values if study.varied else {}
    compared: dict[str, set[Value | None]] = {}
    for run in study.runs:
        control = study.control_of(run)
        if control:
            compared.setdefault(control.name, set()).add(values.get(run.name))
    return [name for name, of_runs in compared.items() if len(of_runs) > 1]
