"""The data of a plot as a table in CSV: a row per point, a column per quantity with its unit in the head."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from study.canvas import RATE_TITLE
from study.plots import Axis, Panel, Plot, Point, Series, Span
from train.run_directory import replaced_file

BOUNDS = ("low", "high")


def write_data(plot: Plot, path: Path) -> None:
    """Writes every point of every panel, intervals beside the values; and the learning rates that are drawn."""
    rows = list(_rows(plot))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with replaced_file(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def _rows(plot: Plot) -> Iterator[dict[str, Any]]:
    for _, panel in plot.shown:
        title = panel.title.partition("\n")[0] if panel.plane else panel.title.replace("\n", ", ")
        for series, point in _points(panel.series):
            head = {"panel": title, "run": series.run or "", "series": series.label}
            yield head | point.facts | _values(panel, point)
        if panel.plane:
            plane, name = panel.plane, f"{panel.plane.title} ({panel.plane.unit})"
            for y, losses in zip(plane.y, plane.increase.tolist(), strict=True):
                for x, loss in zip(plane.x, losses, strict=True):
                    head = {"panel": title, "run": panel.run or "", "series": "grid"}
                    yield head | {name: loss, panel.x.label: x, panel.y.label: y}
    rated = next((panel for _, panel in plot.shown if panel.rates), None)
    if rated:
        for series, point in _points(rated.rates):
            head = {"panel": "", "run": series.run or "", "series": series.label}
            yield head | {rated.x.label: point.x, RATE_TITLE: point.y}


def _points(lines: tuple[Series, ...]) -> Iterator[tuple[Series, Point]]:
    return ((series, point) for series in lines if series.is_data for point in series.points)


def _values(panel: Panel, point: Point) -> dict[str, Any]:
    return _value(panel.x, point.x, point.x_interval) | _value(panel.y, point.y, point.y_interval)


def _value(axis: Axis, value: float, interval: Span | None) -> dict[str, Any]:
    if axis.is_place:
        return {}
    found = {axis.label: value}
    if interval:
        found |= {f"{axis.label}, {bound}": end for bound, end in zip(BOUNDS, interval, strict=True)}
    return found
