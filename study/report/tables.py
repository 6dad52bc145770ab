"""Tables of the report: figures with their intervals, as data that a template renders."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from study.axes import text_of
from study.definition import Study
from study.figures.drawn.methods import shown_methods
from study.measurements.titles import spec_title
from study.results.averages import compared_models
from study.results.summary import RunSummary
from study.results.table import Row

STEP_TERMS = {
    "first_order": "g.delta",
    "second_order": "delta'H delta / 2",
    "predicted": "their sum",
    "measured": "measured increase",
    "remainder": "remainder",
}
STEP_RATIOS = {"step_to_mean": "step / mean", "step_to_signed": "step / random signs"}
DARKEST = 0.55  # opacity of the largest value of a heat table


class Cell(NamedTuple):
    """A cell: its text, the interval below it, and the opacity of its ground."""

    text: str
    interval: str = ""
    shade: float = 0.0


class Table(NamedTuple):
    """A table with its title and note; `groups` are heads over several columns."""

    title: str
    note: str
    head: Sequence[str]
    body: Sequence[Sequence[Cell]]
    groups: Sequence[tuple[str, int]] = ()

    @property
    def name(self) -> str:
        """The name of its files."""
        return re.sub("[^a-z0-9]+", "_", self.title.lower()).strip("_")

    @property
    def columns(self) -> list[str]:
        """The head of every column, with that of its group."""
        groups = [text for text, count in self.groups for _ in range(count)] or [""] * len(
            self.head
        )
        return [
            f"{group}: {text}" if group else text
            for group, text in zip(groups, self.head, strict=True)
        ]


class _Estimate(NamedTuple):
    value: float
    low: float
    high: float


def _estimate(row: Row | None, column: str) -> _Estimate | None:
    """Return a column of a row with the interval beside it; None where it is not measured."""
    if row is None or row[column] is None:
        return None
    return _Estimate(row[column], row[f"{column}_low"], row[f"{column}_high"])


def _estimates(rows: Iterable[Row | None], column: str) -> list[_Estimate]:
    return [estimate for row in rows if (estimate := _estimate(row, column))]


def _cell(row: Row | None, column: str, digits: int, scale: float = 1.0, unit: str = "") -> Cell:
    estimate = _estimate(row, column)
    if estimate is None:
        return Cell("not measured")
    value, low, high = (f"{scale * end:.{digits}f}" for end in estimate)
    return Cell(f"{value}{unit}", f"[{low}, {high}]")


def _percent_digits(rows: Iterable[Row | None], column: str) -> int:
    """Decimals at which the largest of these shares has three figures in per cent; two at least."""
    largest = max((abs(estimate.value) for estimate in _estimates(rows, column)), default=1.0)
    return max(2, 1 - math.ceil(math.log10(largest))) if largest > 0 else 2


def _figures_of_smallest(rows: Iterable[Row | None], column: str) -> int:
    """Decimals at which the smallest of these values has three figures; four at least."""
    values = [estimate.value for estimate in _estimates(rows, column) if estimate.value > 0]
    return max(4, 2 - math.floor(math.log10(min(values, default=1.0))))


def _digits_of_errors(rows: Iterable[Row | None], column: str, scale: float) -> int:
    """Decimals at which the shortest of these intervals has two figures or more."""
    estimates = _estimates(rows, column)
    widths = [each.high - each.low for each in estimates if each.high > each.low]
    return max(0, 1 - math.floor(math.log10(scale * min(widths, default=1.0))))


def end_table(study: Study, summaries: Sequence[RunSummary]) -> Table:
    """Return a row per end of training: loss, and each error before and after the anneal."""
    specs = study.quantization.specs
    anneals = any(summary.anneals for summary in summaries)
    rows = [(summary.first, summary.last) if anneals else (summary.last,) for summary in summaries]
    errors = {}
    for spec in specs:
        column = f"quant/{spec}/relative_error"
        errors[column] = _percent_digits([row for pair in rows for row in pair], column)
    body = []
    for summary, pair in zip(summaries, rows, strict=True):
        line = [Cell(summary.label), _cell(summary.last, f"quant/{specs[0]}/cross_entropy", 3)]
        for column, digits in errors.items():
            line += [_cell(row, column, digits, 100, " %") for row in pair]
        body.append(line)
    names = ["error before the anneal", "after it"] if anneals else ["error"]
    head = [study.heading, "final loss, nats per token", *names * len(specs)]
    groups = [("", 2), *((spec_title(spec), len(names)) for spec in specs)]
    return Table("End of training", "", head, body, groups)


def heat_tables(study: Study, summaries: Sequence[RunSummary]) -> list[Table]:
    """Return for each spec the divergence by the first axis and the others; none for one axis."""
    if len(study.axes) < 2:
        return []

    # one table per spec: the values of the first axis are lines, those of the others columns
    first, *others = study.axes
    ends = {
        (first.text_of(end.run.name), text_of(others, end.run.name)): end.last for end in summaries
    }
    heads, columns = (list(dict.fromkeys(place[axis] for place in ends)) for axis in (0, 1))
    groups = [("", 1), (" and ".join(axis.name for axis in others), len(columns))]

    tables = []
    for spec in study.quantization.specs:
        figure = f"quant/{spec}/kl_divergence"
        digits = _figures_of_smallest(ends.values(), figure)
        largest = max((each.value for each in _estimates(ends.values(), figure)), default=1.0)
        body = []
        for head in heads:
            line = [Cell(head)]
            for place in ((head, column) for column in columns):
                cell = _cell(ends[place], figure, digits) if place in ends else Cell("")
                estimate = _estimate(ends.get(place), figure)
                shade = DARKEST * estimate.value / largest if estimate and largest > 0 else 0.0
                line.append(cell._replace(shade=round(max(shade, 0.0), 3)))
            body.append(line)
        title = f"KL divergence at the end of training: {spec_title(spec)}"
        tables.append(Table(title, "Nats per token.", [first.name, *columns], body, groups))
    return tables


def method_table(study: Study, summaries: Sequence[RunSummary]) -> Table | None:
    """Return a row per method: the divergence of every run's last checkpoint."""
    if not study.quantization.further:
        return None
    body = []
    ends = [summary.last for summary in summaries]
    for spec in shown_methods(study):
        column = f"quant/{spec}/kl_divergence"
        digits = _figures_of_smallest(ends, column)
        body.append([Cell(spec_title(spec)), *(_cell(row, column, digits) for row in ends)])
    note = f"KL divergence in nats per token, by {study.heading}."
    head = ["method", *(summary.label for summary in summaries)]
    return Table("Methods at the end of training", note, head, body)


def average_table(study: Study, rows: Sequence[Row]) -> Table | None:
    """Return a row per run and compared step of the weights, and of each average up to there."""
    compared = list(compared_models(study, rows))
    if not compared:
        return None

    specs = study.quantization.specs
    figures = ("cross_entropy_quantized", "relative_error", "kl_divergence")
    columns = [f"quant/{specs[0]}/cross_entropy"]
    columns += [f"quant/{spec}/{figure}" for spec in specs for figure in figures]

    # digits, factor and unit of each column
    formats: dict[str, tuple[int, float, str]] = {}
    for column in columns:
        formats[column] = (5 if column.endswith("kl_divergence") else 3, 1, "")
        if column.endswith("relative_error"):
            formats[column] = (_percent_digits((row for *_, row in compared), column), 100, " %")
    body = [
        [
            Cell(label),
            Cell(model),
            *(_cell(row, column, *layout) for column, layout in formats.items()),
        ]
        for label, model, row in compared
    ]

    names = ["quantized loss", "error", "KL divergence"]
    note = (
        "At the end of each phase and of each soup: averages beside the weights of the same step."
        " Losses and divergences in nats per token."
    )
    head = [study.heading, "weights", "loss", *names * len(specs)]
    groups = [("", 3), *((spec_title(spec), 3) for spec in specs)]
    return Table("Averages of weights", note, head, body, groups)


def step_table(study: Study, summaries: Sequence[RunSummary]) -> Table | None:
    """Return a row per spec and run: the terms of the loss increase, and ratios of curvature."""
    if not study.quantization.by_block:
        return None
    body = []
    for spec in study.quantization.by_block:
        terms = {f"curvature/step-{spec}/{term}": 0 for term in STEP_TERMS}
        for term in terms:
            terms[term] = _digits_of_errors((summary.last for summary in summaries), term, 1e3)
        ratios = [f"curvature/step-{spec}/{ratio}" for ratio in STEP_RATIOS]
        for summary in summaries:
            line = [Cell(summary.label), Cell(spec_title(spec))]
            line += [_cell(summary.last, term, digits, 1e3) for term, digits in terms.items()]
            body.append([*line, *(_cell(summary.last, ratio, 2) for ratio in ratios)])
    head = [study.heading, "quantization", *STEP_TERMS.values(), *STEP_RATIOS.values()]
    note = (
        "The step delta goes from the weights at the end of training to the quantized ones. Its"
        " curvature, delta'H delta / |delta|\N{SUPERSCRIPT TWO}, is compared with tr H / N of the"
        " same weights, the mean over random steps, and with the mean over steps of the same"
        " entries with random signs: a ratio to that below 1 means that errors of entries cancel."
        " Intervals are 95%, over microbatches."
    )
    unit = "thousandths of a nat per token"
    groups = [("", 2), (unit, len(STEP_TERMS)), ("curvature", len(STEP_RATIOS))]
    return Table("Along the quantization step", note, head, body, groups)
