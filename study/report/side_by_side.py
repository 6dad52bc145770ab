"""Two studies side by side: settings that differ, differences at the end of training, figures.

Runs match by name, else by label. Where both studies measured on the same documents, differences
are paired over them; else the interval is that of two independent estimates, d -/+ sqrt(sum of
squared half widths) (MOVER: Zou and Donner 2008, "Construction of confidence intervals about effect
measures"), and no verdict is given.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import StringIO
from math import hypot
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from base.errors import UserError
from study.claims.verdict import FIGURES, SIGNIFICANT, signed
from study.definition import Study, load_study
from study.figures.canvas import Canvas
from study.figures.drawing import figures_of, shown_of
from study.figures.looks import DASHED, Look, Runs, runs_of
from study.measurements.titles import spec_title
from study.report import page
from study.report.tables import Table, cells
from study.results.paired import Measured, Paired, other_text
from study.results.summary import AnyRun, Estimate, ends_of_training, estimate, in_order
from study.results.table import Row, read_table, trained

COMPARED = {"cross_entropy": "loss", "cross_entropy_quantized": "quantized loss"} | FIGURES
DRAWN = ("kl_divergence", "quantization_error", "full_against_quantized")  # from the tables alone
HEAD = ("quantization", "figure", "run", "difference", "interval", "p", "verdict")
MOST_SHOWN = 90  # characters of a setting
PLAIN_WIDTH = 200  # columns of the text
CAPTION = "Solid: {}; dashed: {}; runs that match share a colour. "


@dataclass(frozen=True)
class Side:
    """One of the two studies."""

    name: str
    study: Study
    rows: Sequence[Row]
    paired: Paired

    def last(self, run: AnyRun) -> Row | None:
        """Return the row of the last weights of a run."""
        own = (row for row in trained(list(self.rows)) if row["run"] == run.name)
        return next((row for row in own if row["step"] == run.total_steps), None)


class Match(NamedTuple):
    """A run of the first study and its counterpart in the second."""

    label: str
    first: AnyRun
    second: AnyRun


def open_sides(first: Path, second: Path) -> tuple[Side, Side]:
    """Return two studies with their tables, by their names, or by their paths if those agree."""
    if first.resolve() == second.resolve():
        raise UserError(f"{first} and {second} are one directory; give those of two studies")
    studies = {directory: load_study(directory) for directory in (first, second)}
    same = studies[first].name == studies[second].name
    left, right = (
        Side(str(at) if same else study.name, study, read_table(at, study), Paired(at))
        for at, study in studies.items()
    )
    return left, right


def match_runs(first: Study, second: Study) -> list[Match]:
    """Return every run of `first` that has its counterpart in `second`, each used once."""
    others = {run.name: run for run in second.runs}
    matched = {run.name: others.pop(run.name) for run in first.runs if run.name in others}
    by_label = {second.label_of(run): run for run in others.values()}
    for run in first.runs:
        if run.name not in matched and first.label_of(run) in by_label:
            matched[run.name] = by_label.pop(first.label_of(run))
    runs = (run for run in in_order(first) if run.name in matched)
    return [Match(first.label_of(run), run, matched[run.name]) for run in runs]


def compare(first: Side, second: Side) -> list[Table]:
    """Return what differs: settings, and figures at the end of training."""
    matches = match_runs(first.study, second.study)
    return [_settings(first, second, matches), _ends(first, second, matches)]


def _settings(first: Side, second: Side, matches: list[Match]) -> Table:
    """Settings that differ, of the studies and of the runs that match."""
    pairs: dict[str, tuple[Any, Any]] = {"study": (first.study, second.study)}
    pairs |= {f"run {match.label}": (match.first, match.second) for match in matches}
    differences: dict[tuple[str, str, str], list[str]] = {}
    for of, both in pairs.items():
        one, other = (_flat(value.model_dump(mode="json", exclude={"runs"})) for value in both)
        for key in dict.fromkeys([*one, *other]):
            values = (key, _short(one.get(key, "absent")), _short(other.get(key, "absent")))
            # the fingerprint of a parent differs wherever the parent does
            if one.get(key) != other.get(key) and key != "branch_from.fingerprint":
                differences.setdefault(values, []).append(of)
    body = [cells([", ".join(of), *values]) for values, of in differences.items()]
    note = "" if body else "The two studies have the same settings."
    return Table("Settings that differ", note, ("of", "setting", first.name, second.name), body)


def _flat(content: Any, prefix: str = "") -> dict[str, str]:
    """Dotted key -> value as JSON."""
    if isinstance(content, dict) and content:
        parts = (_flat(value, f"{prefix}{key}.") for key, value in content.items())
        return {key: value for part in parts for key, value in part.items()}
    return {prefix.removesuffix("."): json.dumps(content)}


def _short(value: str) -> str:
    return value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}..."


def _ends(first: Side, second: Side, matches: list[Match]) -> Table:
    """The last weights of the matched runs that are ends of training, by spec and figure."""
    ends = [{run.name for run in ends_of_training(side.study)} for side in (first, second)]
    chosen = [
        match for match in matches if match.first.name in ends[0] and match.second.name in ends[1]
    ]
    others = second.study.quantization.at_the_end
    specs = [spec for spec in first.study.quantization.at_the_end if spec in others]
    body, reasons = [], set[str]()
    for spec in specs:
        for figure, name in COMPARED.items():
            if figure == "cross_entropy" and spec != specs[0]:
                continue  # the same at every quantization
            lines, unpaired = _lines(first, second, chosen, spec, figure)
            body += [cells([spec_title(spec), name, *line]) for line in lines]
            reasons |= unpaired
    note = (
        "Second minus first. Paired over documents where p is given: bootstrap-t, Holm's correction"
        " over the runs of a figure, 95% intervals not corrected. Relative errors in per cent, the"
        " rest in nats per token."
    )
    if reasons:
        differing = ", ".join(sorted(reasons))
        note += f" Not paired, two independent intervals: the studies differ in {differing}."
    sides = ((first, {match.first.name for match in matches}),
             (second, {match.second.name for match in matches}))  # fmt: skip
    for side, taken in sides:
        alone = [side.study.label_of(run) for run in side.study.runs if run.name not in taken]
        note += f" Only in {side.name}: {', '.join(alone)}." if alone else ""
    head = (*HEAD[:3], first.name, second.name, *HEAD[3:])
    return Table("End of training", note, head, body)


def _lines(
    first: Side, second: Side, matches: list[Match], spec: str, figure: str
) -> tuple[list[list[str]], set[str]]:
    """A line per matched run, and why some are not paired."""
    column, lines, reasons = f"quant/{spec}/{figure}", dict[str, list[str]](), set[str]()
    pairs: dict[str, tuple[Measured, Measured]] = {}
    for label, *runs in matches:
        rows = [side.last(run) for side, run in zip((first, second), runs, strict=True)]
        one, other = (estimate(row, column) for row in rows)
        values = [_number(value, figure) for value in (one, other)]
        lines[label] = [label, *values, "", "", "", ""]
        if one is None or other is None or rows[0] is None or rows[1] is None:
            continue
        results = (first.paired.result(rows[0], spec), second.paired.result(rows[1], spec))
        reason = other_text(*results)
        if reason is None:
            pairs[label] = ((rows[0], spec), (rows[1], spec))
            continue
        reasons.add(reason)
        value = other.value - one.value
        low = value - hypot(other.value - other.low, one.high - one.value)
        high = value + hypot(other.high - other.value, one.value - one.low)
        lines[label][3:] = [signed(value, figure), _interval(low, high, figure), "", "not paired"]
    compared = first.paired.compared(list(pairs.values()), figure, second.paired)
    for label, found in zip(pairs, compared, strict=True):
        difference = found.difference
        is_significant = found.verdict in SIGNIFICANT
        lines[label][3:] = [
            signed(difference.value, figure),
            _interval(difference.low, difference.high, figure),
            f"{found.p_adjusted:.2g}",
            found.verdict if is_significant else "no significant difference",
        ]
    return list(lines.values()), reasons


def _interval(low: float, high: float, figure: str) -> str:
    return f"[{signed(low, figure)}, {signed(high, figure)}]"


def _number(known: Estimate | None, figure: str) -> str:
    if known is None:
        return "not measured"
    return f"{100 * known.value:.4g}%" if figure == "relative_error" else f"{known.value:.5g}"


def text_of(tables: Sequence[Table]) -> str:
    """Return the tables for a terminal."""
    text = StringIO()
    console = Console(file=text, width=PLAIN_WIDTH, highlight=False, markup=False, emoji=False)
    for table in tables:
        console.print(table.title.upper(), table.note, sep="\n")
        if table.body:
            drawn = RichTable(box=box.SIMPLE_HEAD)
            for title in table.head:
                drawn.add_column(title, overflow="fold")
            for line in table.body:
                drawn.add_row(*(cell.text for cell in line))
            console.print(drawn)
    return text.getvalue()


def write_page(first: Side, second: Side, tables: Sequence[Table], path: Path) -> None:
    """Write the tables and the figures of both studies."""
    canvas = both(first, second)
    caption = CAPTION.format(first.name, second.name)
    shown = [
        shown_of(replace(one, caption=caption + one.caption), drawn)
        for one in figures_of(canvas.study)
        if one.name in DRAWN and (drawn := one.draw(canvas))
    ]
    content = page.figures_of(shown, canvas.runs) | {"folder": ""}
    title = f"{first.name} and {second.name}"
    page.write_page("side_by_side.html", path, title=title, tables=tables, **content)


def both(first: Side, second: Side) -> Canvas:
    """Return the runs of both studies as those of one, for figures that read the table alone."""
    suffix = f" ({second.name})"
    names = {run.name: f"{run.name}{suffix}" for run in second.study.runs}
    renamed = [run.model_copy(update={"name": names[run.name]}) for run in second.study.runs]
    for place, run in enumerate(second.study.trained):
        if run.branch_from:
            parent = f"../{names[second.study.parent_of(run).name]}"
            origin = run.branch_from.model_copy(update={"run": parent})
            renamed[place] = renamed[place].model_copy(update={"branch_from": origin})
    study = first.study.model_copy(update={"runs": (*first.study.runs, *renamed)})
    rows = [*first.rows, *(Row.of({**row, "run": names[row.run]}) for row in second.rows)]
    return Canvas(study, rows, Path(), _looks(first, second, names))


def _looks(first: Side, second: Side, names: dict[str, str]) -> Runs:
    """Matched runs share colour and marker; those of the second study are dashed."""
    own = runs_of(first.study).looks
    others = runs_of(second.study).looks
    counterpart = {
        match.second.name: own[match.first.name] for match in match_runs(first.study, second.study)
    }
    looks: dict[str, Look] = {}
    for name, look in own.items():
        looks[name] = replace(look, label=f"{look.label} ({first.name})")
    for name, look in others.items():
        look = counterpart.get(name, look)
        label = f"{others[name].label} ({second.name})"
        looks[names[name]] = replace(look, label=label, dash=DASHED)
    return Runs(first.study.heading, looks)
