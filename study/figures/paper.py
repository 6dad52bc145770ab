"""Charts at the width of a column of a paper with two: 3.25 inches, with text of 8 points."""

import json
import re
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

import vl_convert

from base.quantities import typeset
from study.figures.charts import Chart

COLUMN, BOTH = 234.0, 486.0  # points of a column, and of both with what is between them
TEXT, LETTER = 8, 4.6  # points of the text, and of the width of a letter
BESIDE, RATES = 54, 34  # points beside a panel: its own axis, and that of learning rates
LEAST = 90  # points of a panel in one column; narrower ones take both
LOWER = 0.56  # of the height of panels on the page
CLOSE = 0.02  # of the width, by which a picture may be scaled
FONTS = ("fontSize", "labelFontSize", "titleFontSize")
CONFIG: Chart = {
    "axis": dict.fromkeys(FONTS[1:], TEXT) | {"labelLimit": 200},
    "title": {"fontSize": TEXT},
    "legend": dict.fromkeys(FONTS[1:], TEXT) | {"titleOrient": "top", "symbolSize": 40},
}


def paper_svg(chart: Chart) -> str:
    """Return a chart as SVG at the width of a column, its panels below each other.

    Charts whose labels leave no room for panels have the width of two columns, as on the page.
    """
    text = typeset(json.dumps(chart))
    beside: float = BESIDE + (RATES if '"orient": "right"' in text else 0)
    # What is beside a panel is known once it is drawn; mostly the first width is close enough.
    for _ in range(3):
        panel = COLUMN - beside
        if panel < LEAST:
            return _drawn(_laid_out(text, chart["columns"], _panel_in_both(chart)), BOTH)
        svg = _drawn(_laid_out(text, 1, panel), COLUMN)
        beside += _natural_width(svg) - COLUMN
        if abs(_natural_width(svg) / COLUMN - 1) <= CLOSE:
            break
    return svg


def _panel_in_both(chart: Chart) -> float:
    """Return the width of a panel where the chart is as wide as two columns."""
    # The chart is scaled to that width, which keeps its text readable for few panels beside.
    columns: int = chart["columns"]
    return max(LEAST, BOTH / columns - BESIDE - RATES)


def _drawn(chart: Chart, width: float) -> str:
    """Return a chart as SVG of a width, to which it is scaled."""
    svg = vl_convert.vegalite_to_svg(json.dumps(chart, allow_nan=False))
    natural = _natural_width(svg)
    height = float(re.search(r' height="([\d.]+)"', svg)[1]) * width / natural  # type: ignore[index]
    return re.sub(
        r' width="[\d.]+" height="[\d.]+"', f' width="{width:g}" height="{height:g}"', svg, count=1
    )


def _natural_width(svg: str) -> float:
    """Return the width that a chart takes by itself."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ', svg)
    assert box
    return float(box[1])


def _laid_out(text: str, columns: int, width: float) -> Chart:
    """Return a copy of a chart with so many panels beside each other, of a width."""
    chart: Chart = json.loads(text)
    for panel in chart["concat"]:
        is_square = panel["width"] == panel["height"]
        panel["height"] = round(width if is_square else LOWER * panel["height"])
        panel["width"] = round(width)
        panel["title"] = [line for title in panel["title"] for line in _wrapped(title, width)]
    for part in _parts_of(chart["concat"]):
        _set(part)
    config = chart["config"]
    merged = {name: config.get(name, {}) | part for name, part in CONFIG.items()}
    return chart | {"columns": columns, "spacing": 14, "config": config | merged}


def _wrapped(title: str, width: float) -> list[str]:
    return wrap(title, int((width + BESIDE) / LETTER)) or [""]


def _set(part: dict[str, Any]) -> None:
    """Give text of a part of a chart its size, and break what is too long."""
    for name in FONTS:
        if name in part:
            part[name] = TEXT
    for axis in ("x", "y"):
        encoding = part.get(axis)
        if isinstance(encoding, dict) and isinstance(encoding.get("title"), str):
            encoding["title"] = wrap(encoding["title"], 32)
    if "labelExpr" in part and "columns" in part:
        widest = max(len(str(value)) for value in part["values"])
        part["columns"] = max(1, int(COLUMN // (LETTER * widest + 40)))


def _parts_of(chart: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a chart but its data."""
    if isinstance(chart, list):
        for each in chart:
            yield from _parts_of(each)
    elif isinstance(chart, dict):
        yield chart
        for name, each in chart.items():
            if name != "data":
                yield from _parts_of(each)
