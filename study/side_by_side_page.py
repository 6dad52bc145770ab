"""Two studies side by side as one page without scripts, as text, and drawn in the same panels."""

import base64
from collections.abc import Iterator
from html import escape
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from study.canvas import Look, looks_for
from study.settings import spec_title
from study.side_by_side import COMPARED, Match, Side, Table, match_runs
from study.summary import Rows
from train.run_directory import replaced_file

PLAIN_WIDTH = 200  # columns of the text
DRAWN = ("cross_entropy", "relative_error", "kl_divergence")
STYLES: tuple[Any, Any] = ({"linestyle": "-"}, {"linestyle": "--", "markerfacecolor": "white"})
STYLE = """
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; color: #1c1c1c; background: #fff; max-width: 74rem;
  margin: 2.5rem auto; padding: 0 1.5rem; } h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
.note { color: #555; font-size: .87rem; } img { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #e4e4e4; vertical-align: top;
  overflow-wrap: anywhere; }
"""


def write_page(first: Side, second: Side, tables: list[Table], path: Path) -> None:
    """Writes the page aside, then renames it."""
    title = f"{first.name} and {second.name}"
    figure = base64.b64encode(_png(first, second)).decode()
    caption = (
        f"Along training, by tokens: {first.name} solid with filled marks, {second.name} dashed with open ones; runs "
        "that match share a colour. Bars are the intervals of each model for itself."
    )
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{escape(title)}</title><style>{STYLE}</style></head><body><h1>{escape(title)}</h1>
<figure><img alt="{escape(caption)}" src="data:image/png;base64,{figure}">
<figcaption class="note">{escape(caption)}</figcaption></figure>
{"".join(map(_html, tables))}
</body></html>
"""
    with replaced_file(path) as aside:
        aside.write_text(page, encoding="utf-8")


def _html(table: Table) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in table.body)
    drawn = f"<table><thead>{row(table.head, 'th')}</thead><tbody>{body}</tbody></table>" if body else ""
    return f'<h2>{escape(table.title)}</h2><p class="note">{escape(table.note)}</p>{drawn}'


def text_of(tables: list[Table]) -> str:
    """The tables for a terminal."""
    console = Console(file=StringIO(), width=PLAIN_WIDTH, highlight=False, markup=False, emoji=False)
    for table in tables:
        console.print(table.title.upper(), style=None)
        if table.note:
            console.print(table.note)
        if table.body:
            drawn = RichTable(box=box.SIMPLE_HEAD)
            for title in table.head:
                drawn.add_column(title, overflow="fold")
            for cells in table.body:
                drawn.add_row(*cells)
            console.print(drawn)
        console.print()
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def _looks(first: Side, second: Side, matches: list[Match]) -> Iterator[tuple[Side, str, Look, Any]]:
    """Every run with its look and the style of its study; matched runs share the look."""
    seconds = {match.second.name: match.label for match in matches}
    firsts = {run.name: first.study.label_of(run) for run in first.study.runs}
    own = {run.name: second.study.label_of(run) for run in second.study.runs if run.name not in seconds}
    names = [*firsts.values(), *(f"{label} ({second.name})" for label in own.values())]
    looks = {look.label: look for look in looks_for(dict.fromkeys(names))}
    for name, label in firsts.items():
        yield first, name, looks[label], STYLES[0]
    for run in second.study.runs:
        label = seconds.get(run.name) or f"{own[run.name]} ({second.name})"
        yield second, run.name, looks[label], STYLES[1]


def _png(first: Side, second: Side) -> bytes:
    """A row of panels per figure, a column per spec that both studies measure along training."""
    specs = [spec for spec in first.study.quantization.specs if spec in second.study.quantization.specs]
    columns = max(len(specs), 1)
    figure = Figure(figsize=(5.2 * columns + 0.4, 3.4 * len(DRAWN)), dpi=110, layout="constrained")
    axes = figure.subplots(len(DRAWN), columns, squeeze=False)
    drawn = list(_looks(first, second, match_runs(first.study, second.study)))
    for place, spec in enumerate(specs):
        axes[0][place].set_title(spec_title(spec))
        for axis, name in zip(axes[:, place], DRAWN, strict=True):
            for side, run, look, style in drawn:
                _line(axis, [row for row in side.rows if row["run"] == run], f"quant/{spec}/{name}", look, style)
            unit = "" if name == "relative_error" else " (nats per token)"
            axis.set(xlabel="training tokens", ylabel=COMPARED[name] + unit)
            axis.grid(visible=True, color="#e6e6e6", linewidth=0.6)
    looks = {look.label: look for _, _, look, _ in drawn}.values()
    handles = [Line2D([], [], color=look.colour, marker=look.marker, label=look.label) for look in looks]
    for side, style in zip((first, second), STYLES, strict=True):
        handles.append(Line2D([], [], color="#555555", marker="o", label=side.name, **style))
    figure.legend(handles=handles, loc="outside upper left", ncols=4)
    written = BytesIO()
    figure.savefig(written, format="png", metadata={"Software": None})
    return written.getvalue()


def _line(axis: Any, rows: Rows, column: str, look: Look, style: Any) -> None:
    known = [row for row in rows if row["average"] is None and row[column] is not None and row["tokens"] is not None]
    if known:
        below = [row[column] - row[f"{column}_low"] for row in known]
        above = [row[f"{column}_high"] - row[column] for row in known]
        bars = None if column.endswith("/cross_entropy") else [below, above]  # as wide as the panel, shared by all
        tokens, values = [row["tokens"] for row in known], [row[column] for row in known]
        axis.errorbar(tokens, values, yerr=bars, color=look.colour, marker=look.marker, elinewidth=0.8, **style)
