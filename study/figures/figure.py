"""A figure of the report, and the drawing of all: PNG, SVG and PDF, with the rows as CSV."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import vl_convert
from matplotlib.figure import Figure as Picture
from PIL import Image

from base.files import replaced_file
from base.progress import Progress
from base.quantities import typeset
from study.content import loaded
from study.definition import Study
from study.experiments import Experiment
from study.figures.canvas import Canvas
from study.figures.charts import ENDS, PLACE, Chart, Rows, grid
from study.figures.paper import paper_svg


class Drawn(NamedTuple):
    """A figure with data: a row per value, which are written beside it as CSV, and the chart.

    It is matplotlib's where Vega-Lite has no such mark: contours.
    """

    rows: Rows
    chart: Chart | Picture


@dataclass(frozen=True)
class Figure:
    """A figure as the report knows it; `draw` returns None where nothing of it is measured yet.

    It does not apply to a study that will never hold such data. Headlines are beside the claims.
    """

    name: str
    caption: str
    applies: Callable[[Study], bool]
    draw: Callable[[Canvas], Drawn | None]
    headline: Callable[[Study], bool]


def figure(
    name: str,
    caption: str,
    applies: Callable[[Study], bool] = lambda _: True,
    *,
    headline: Callable[[Study], bool] = lambda _: False,
) -> Callable[[Callable[[Canvas], Drawn | None]], Figure]:
    """Make a figure of the function that draws it; see `Figure`."""
    return lambda draw: Figure(name, caption, applies, draw, headline)


def drawn(
    panels: Sequence[tuple[Rows, Chart]], columns: int, rates: Sequence[dict[str, object]] = ()
) -> Drawn | None:
    """Return a figure of panels with their rows, side by side; None without any.

    Learning rates are drawn in the panels, so they are among the rows of the figure.
    """
    rows = [row for panel_rows, _ in panels for row in panel_rows]
    charts = [chart for _, chart in panels]
    return Drawn([*rows, *rates], grid(charts, columns)) if rows else None


DIRECTORY = "figures"
PNG_SCALE, COLOURS = 2.0, 128
METADATA: dict[str, Any] = {  # without versions and dates: the same numbers make the same file
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
}
FILES = ("csv", "pdf", "svg", "png")  # of every figure
BANDS = "Lines are means over seeds, bands reach from the lowest seed to the highest."
ORDER = "Right of the dashed rule: what follows pretraining, in order, without tokens of it."
EMBEDDED: Any = {
    "pdf.fonttype": 42,  # TrueType; publishers refuse matplotlib's default, Type 3
    "svg.fonttype": "none",  # text that can be edited
    "svg.hashsalt": "quantdyn",  # else names in the file are by chance
}
CLIPS = re.compile(r"\bclip\d+")  # names in an SVG; vl-convert counts through a process
RESOURCES = re.compile(rb"(?: +/\w+ \d+ 0 R\n)+")  # of a page; their order is by chance


class DrawnFigure(NamedTuple):
    """A figure of a page; the chart is None for a picture that stays one."""

    name: str
    number: int
    caption: str
    png: bytes
    chart: Chart | None
    headline: bool


def figures_of(study: Study, experiment: Experiment | None = None) -> list[Figure]:
    """Return the figures that the study can have, in the order of the report.

    Of an experiment, whose runs the study has, those that it names, in its order.
    """
    figures: list[Figure] = loaded("figures")
    possible = {figure.name: figure for figure in figures if figure.applies(study)}
    names = experiment.figures if experiment and experiment.figures else possible
    return [possible[name] for name in names if name in possible]


def draw_all(
    canvas: Canvas, experiment: Experiment | None = None
) -> tuple[list[DrawnFigure], list[str]]:
    """Write STUDY/figures/NAME and the ends of `FILES` of what holds data; the rest is removed.

    Of an experiment, whose runs the canvas has, they are in a folder of its name.

    Returns:
        What is drawn, and the names of the figures of which nothing is measured.
    """
    shown: list[DrawnFigure] = []
    empty: list[str] = []
    folder = canvas.directory / DIRECTORY / (experiment.name if experiment else "")
    folder.mkdir(parents=True, exist_ok=True)
    figures = figures_of(canvas.study, experiment)
    for figure, drawing in _drawings(figures, canvas):
        if drawing is None:
            empty.append(figure.name)
            for kind in FILES:
                # Files of an earlier report would show what the table does not hold any more.
                (folder / f"{figure.name}.{kind}").unlink(missing_ok=True)
            continue
        png = write_figure(drawing, folder / figure.name)
        chart = None if isinstance(drawing.chart, Picture) else drawing.chart
        caption = _caption(figure, chart, canvas.study.captions.get(figure.name, ""))
        headline = figure.headline(canvas.study)
        number = len(shown) + 1
        shown.append(DrawnFigure(figure.name, number, caption, png, chart, headline))
    return shown, empty


def _drawings(figures: Sequence[Figure], canvas: Canvas) -> Iterator[tuple[Figure, Drawn | None]]:
    """Yield what is drawn of each figure, and show how many are done."""
    with Progress("figures", total=len(figures)) as progress:
        for figure in figures:
            yield figure, figure.draw(canvas)
            progress.advance()


def draw_one(canvas: Canvas, name: str, experiment: Experiment | None = None) -> Path | None:
    """Write the files of one figure that the study has, and return its PDF.

    None where nothing of it is measured.
    """
    by_name = {figure.name: figure for figure in figures_of(canvas.study, experiment)}
    drawing = by_name[name].draw(canvas)
    if drawing is None:
        return None
    folder = canvas.directory / DIRECTORY / (experiment.name if experiment else "")
    folder.mkdir(parents=True, exist_ok=True)
    write_figure(drawing, folder / name)
    return folder / f"{name}.pdf"


def write_figure(drawing: Drawn, path: Path) -> bytes:
    """Write PATH.csv, and pictures beside it; return the PNG."""
    pictures = pictures_of(drawing.chart)
    write_rows(drawing.rows, Path(f"{path}.csv"))
    for kind, content in pictures.items():
        with replaced_file(Path(f"{path}.{kind}")) as aside:
            aside.write_bytes(content)
    return pictures["png"]


def _caption(figure: Figure, chart: Chart | None, beginning: str) -> str:
    """Return the caption after its beginning, with what bands and places in order are."""
    caption = f"{beginning}. {figure.caption}" if beginning else figure.caption
    drawn_of = "" if chart is None else json.dumps(chart)
    said = {BANDS: ENDS[0], ORDER: f'"{PLACE}"'}
    return " ".join([caption, *(words for words, mark in said.items() if mark in drawn_of)])


def _in_order(lines: re.Match[bytes]) -> bytes:
    return b"".join(sorted(lines[0].splitlines(keepends=True)))


def write_rows(rows: Rows, path: Path) -> None:
    """Write rows as CSV, a column per quantity with its unit in the head."""
    columns = list(dict.fromkeys(key for row in rows for key in row if key != PLACE))
    with replaced_file(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(
            file, columns, restval="", extrasaction="ignore", lineterminator="\n"
        )
        table.writeheader()
        table.writerows(rows)


def pictures_of(chart: Chart | Picture) -> dict[str, bytes]:
    """Return a chart as PNG and SVG, and as PDF at the width of a column of a paper."""
    if isinstance(chart, Picture):
        chart.draw_without_rendering()
        chart.set_layout_engine("none")  # laid out once: all files keep the places that it has now
        return {kind: _saved(chart, kind) for kind in METADATA}
    # matplotlib's own fonts: on every machine the same picture
    vl_convert.register_font_directory(str(Path(matplotlib.get_data_path()) / "fonts/ttf"))
    svg = vl_convert.vegalite_to_svg(typeset(json.dumps(chart, allow_nan=False)))
    image = Image.open(BytesIO(vl_convert.svg_to_png(svg, scale=PNG_SCALE)))
    png = BytesIO()
    # A palette makes the file smaller; dithering would put noise into even areas.
    image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(png, "png")
    pdf = RESOURCES.sub(_in_order, vl_convert.svg_to_pdf(paper_svg(chart)))
    return {"png": png.getvalue(), "svg": _renumbered(svg).encode(), "pdf": pdf}


def _renumbered(svg: str) -> str:
    """Return an SVG whose clip paths are numbered from 0."""
    names = {name: f"clip{number}" for number, name in enumerate(dict.fromkeys(CLIPS.findall(svg)))}
    return CLIPS.sub(lambda match: names[match[0]], svg)


def _saved(picture: Picture, kind: str) -> bytes:
    out = BytesIO()
    with matplotlib.rc_context(EMBEDDED):
        picture.savefig(out, format=kind, metadata=METADATA[kind])
    return out.getvalue()
