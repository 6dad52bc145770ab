"""Tables of the report: figures of the ends of training, with their intervals."""

from collections.abc import Mapping, Sequence
from itertools import chain

from dynamics.figures.methods import shown_methods
from study.axes import text_of
from study.definition import Study
from study.measurements.titles import spec_title
from study.report.cells import (
    Bounded,
    Cell,
    Table,
    all_bounded,
    bounded,
    cell,
    digits_of_errors,
    digits_of_smallest,
    of_estimate,
    percent_digits,
)
from study.results.averages import compared_models
from study.results.paired import Paired
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
NATS = "nats per token"
PERCENT = "%"
OF_FIRST_SEED = " Measured for the first seed of each setting."


def end_table(study: Study, summaries: Sequence[RunSummary], paired: Paired) -> Table:
    """Return a row per setting: final loss, and errors beside that of the control; seeds' means."""
    groups: dict[str, list[RunSummary]] = {}
    for summary in summaries:
        groups.setdefault(summary.group, []).append(summary)
    ends = [[end.last for end in own] for own in groups.values()]
    controls = [[end.control for end in own] for own in groups.values()]
    measured = [ends, controls] if study.controls else [ends]

    specs = study.quantization.specs
    columns = [[cell(_mean(rows, specs[0], "cross_entropy", paired), 3) for rows in ends]]
    for spec in specs:
        divergences = [
            [_mean(rows, spec, "kl_divergence", paired) for rows in of] for of in measured
        ]
        digits = digits_of_smallest(chain(*divergences))
        columns += [[cell(value, digits) for value in values] for values in divergences]
        shares = [_mean(rows, spec, "relative_error", paired) for rows in ends]
        digits = percent_digits(shares)
        columns.append([cell(value, digits, 100, PERCENT) for value in shares])

    body = [[Cell(group), *cells] for group, *cells in zip(groups, *columns, strict=True)]
    names = [f"KL divergence, {NATS}", "the same, not annealed"][: len(measured)]
    names.append("relative error")
    head = [study.heading, f"final loss, {NATS}", *names * len(specs)]
    heads = [("", 2), *((spec_title(spec), len(names)) for spec in specs)]
    return Table("End of training", _means_note(groups), head, body, heads)


def _means_note(groups: Mapping[str, Sequence[RunSummary]]) -> str:
    counts = sorted({len(ends) for ends in groups.values()} - {1})
    if not counts:
        return ""
    seeds = " or ".join(map(str, counts))
    return f"Means over {seeds} seeds; their intervals hold documents, calibration draws and seeds."


def _mean(rows: Sequence[Row | None], spec: str, figure: str, paired: Paired) -> Bounded | None:
    """Return the figure of one row, or the mean of those of several seeds; None for missing."""
    column = f"quant/{spec}/{figure}"
    measured = [row for row in rows if row is not None and row[column] is not None]
    if len(measured) < 2:
        return bounded(measured[0], column) if measured else None
    return of_estimate(paired.estimate([[(row, 1.0)] for row in measured], spec, figure))


def _detailed(study: Study, summaries: Sequence[RunSummary]) -> list[RunSummary]:
    """Return the ends of which the study measures more than the quantization of checkpoints."""
    return [
        summary
        for summary in summaries
        if study.detailed == "every seed" or study.group_of(summary.run).runs[0] == summary.run
    ]


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
        values = all_bounded(ends.values(), figure)
        digits = digits_of_smallest(values)
        largest = max((each.value for each in values), default=1.0)
        body = []
        for head in heads:
            line = [Cell(head)]
            for place in ((head, column) for column in columns):
                value = bounded(ends.get(place), figure)
                shade = DARKEST * value.value / largest if value and largest > 0 else 0.0
                shown = cell(value, digits) if place in ends else Cell("")
                line.append(shown._replace(shade=round(max(shade, 0.0), 3)))
            body.append(line)
        title = f"KL divergence at the end of training: {spec_title(spec)}"
        tables.append(Table(title, "Nats per token.", [first.name, *columns], body, groups))
    return tables


def method_table(study: Study, summaries: Sequence[RunSummary]) -> Table | None:
    """Return a row per method: the divergence of every run's last checkpoint."""
    if not study.quantization.further:
        return None
    body = []
    detailed = _detailed(study, summaries)
    for spec in shown_methods(study):
        values = [bounded(end.last, f"quant/{spec}/kl_divergence") for end in detailed]
        digits = digits_of_smallest(values)
        body.append([Cell(spec_title(spec)), *(cell(value, digits) for value in values)])
    note = f"KL divergence in {NATS}, by {study.heading}."
    note += OF_FIRST_SEED if len(detailed) < len(summaries) else ""
    head = ["method", *(end.label for end in detailed)]
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
            digits = percent_digits(bounded(row, column) for *_, row in compared)
            formats[column] = (digits, 100, PERCENT)
    body = [
        [
            Cell(label),
            Cell(model),
            *(cell(bounded(row, column), *layout) for column, layout in formats.items()),
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
    detailed = _detailed(study, summaries)
    for spec in study.quantization.by_block:
        terms = {}
        for name in STEP_TERMS:
            term = f"curvature/step-{spec}/{name}"
            terms[term] = digits_of_errors((bounded(end.last, term) for end in detailed), 1e3)
        ratios = [f"curvature/step-{spec}/{ratio}" for ratio in STEP_RATIOS]
        for end in detailed:
            line = [Cell(end.label), Cell(spec_title(spec))]
            line += [cell(bounded(end.last, term), digits, 1e3) for term, digits in terms.items()]
            body.append([*line, *(cell(bounded(end.last, ratio), 2) for ratio in ratios)])
    head = [study.heading, "quantization", *STEP_TERMS.values(), *STEP_RATIOS.values()]
    note = (
        "The step delta goes from the weights at the end of training to the quantized ones. Its"
        " curvature, delta'H delta / |delta|\N{SUPERSCRIPT TWO}, is compared with tr H / N of the"
        " same weights, the mean over random steps, and with the mean over steps of the same"
        " entries with random signs: a ratio to that below 1 means that errors of entries cancel."
        " Intervals are 95%, over microbatches."
    )
    note += OF_FIRST_SEED if len(detailed) < len(summaries) else ""
    unit = "thousandths of a nat per token"
    groups = [("", 2), (unit, len(STEP_TERMS)), ("curvature", len(STEP_RATIOS))]
    return Table("Along the quantization step", note, head, body, groups)
