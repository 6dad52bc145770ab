"""Tables of the report: effects of the factors, and figures of the ends of training."""

from collections.abc import Iterable, Mapping, Sequence

from base.grouping import grouped
from base.quantities import MILLI, MILLINATS
from base.statistics import INTERVAL_LEVEL
from quant_eval.specs import parse_spec
from study.axes import Axis, text_of
from study.definition import Study
from study.measurements.kind import NATS, Column
from study.measurements.quantization import (
    CROSS_ENTROPY,
    QUANTIZED_LOSS,
    RELATIVE_ERROR,
)
from study.measurements.step import RATIOS, TERMS
from study.measurements.titles import spec_title
from study.report.cells import (
    MISSING,
    Bounded,
    Cell,
    Table,
    bounded,
    cell,
    of_estimate,
)
from study.results.averages import compared_models
from study.results.effects import Effect, Measured, measures
from study.results.paired import Paired
from study.results.summary import RunSummary, enumeration
from study.results.table import Row


def effect_tables(study: Study, effects: Mapping[str, Sequence[Effect]]) -> list[Table]:
    """Return a table for every factor: each of its values against the first, by each measure."""
    return [_table(study, axis, effects[axis.key]) for axis in study.axes if axis.key in effects]


def _table(study: Study, axis: Axis, effects: Sequence[Effect]) -> Table:
    compared: dict[tuple[str, str], dict[Measured, Effect]] = {}
    for effect in effects:
        compared.setdefault((effect.value, effect.reference), {})[effect.measure] = effect
    body = [
        [
            Cell(f"{value} against {reference}"),
            *(_cell(by_measure.get(measure)) for measure in measures(study)),
            Cell(_counted([effect.pairs for effect in by_measure.values()])),
        ]
        for (value, reference), by_measure in compared.items()
    ]
    figures = [figure for _, figure in measures(study)]
    # The loss stands for the end of training here, not beside a quantization.
    titles = [FINAL_LOSS if figure == CROSS_ENTROPY else figure.title for figure in figures]
    names = [
        f"{title}, {figure.difference_unit}" for title, figure in zip(titles, figures, strict=True)
    ]
    head = [axis.title, *names, "pairs of runs"]
    specs, errors = study.quantization.specs, len(study.quantization.measures)
    groups = [("", 2), *((spec_title(spec), errors) for spec in specs), ("", 1)]
    return Table(
        f"Effect of {axis.name} at the end", _note(study, axis, effects), head, body, groups
    )


def _cell(effect: Effect | None) -> Cell:
    """Return the difference as the claims show theirs, with its interval and p-value."""
    if effect is None:
        return Cell(MISSING)
    estimate, figure = effect.estimate, effect.measure.figure
    values = (estimate.value, *estimate.interval())
    text, _, interval = figure.difference(*values).partition(" ")
    p = f"p {estimate.p_value():.2g}" + ("" if estimate.holds_seeds else "*")
    numbers = (*(figure.difference_scale * value for value in values), estimate.p_value())
    return Cell(text, f"{interval}, {p}", numbers=numbers)


def _counted(counts: Sequence[int]) -> str:
    return " to ".join(dict.fromkeys(f"{end(counts)}" for end in (min, max)))


def _note(study: Study, axis: Axis, effects: Sequence[Effect]) -> str:
    """Return what is compared, and which noise the intervals hold and leave out."""
    if not effects:
        return f"No two measured ends differ in {axis.name} alone: nothing can be compared."
    equal = enumeration(["seed", *(other.name for other in study.axes if other is not axis)])
    estimates = [effect.estimate for effect in effects]
    sources = dict.fromkeys(name for estimate in estimates for name in estimate.sources)
    note = (
        f"Differences between runs of equal {equal}, over the same documents and calibration draws."
        f" {INTERVAL_LEVEL:.0%} intervals, and p of no difference (Student's t, not corrected for"
        f" the number of comparisons), hold {enumeration(list(sources))}."
    )
    if not all(estimate.holds_seeds for estimate in estimates):
        note += (
            " * One training of each value: they leave out the seed of training, which moves the"
            " difference too."
        )
    return note


FINAL_LOSS = "final loss"
LOSSES = (CROSS_ENTROPY, QUANTIZED_LOSS)
DARKEST = 0.55  # opacity of the largest value of a heat table
LOSS_DIGITS = 3  # decimals of a loss
OF_FIRST_SEED = " Of the first seed of each setting."


def end_table(study: Study, summaries: Sequence[RunSummary], paired: Paired) -> Table:
    """Return a row per setting: final loss, and errors beside that of the control; seeds' means."""
    groups = grouped(summaries, lambda summary: summary.group)
    ends = [[end.last for end in of_group] for of_group in groups.values()]
    controls = [[end.control for end in of_group] for of_group in groups.values()]
    measured = [ends, controls] if study.controls else [ends]

    specs, (first, *others) = study.quantization.specs, study.quantization.measures
    losses = [_mean(rows, specs[0], CROSS_ENTROPY, paired) for rows in ends]
    columns = [[_shown(CROSS_ENTROPY, loss) for loss in losses]]
    for spec in specs:
        # The first error is compared with the control's, the others are of the ends alone.
        for error, sides in ((first, measured), *((other, [ends]) for other in others)):
            columns += [
                [_shown(error, _mean(rows, spec, error, paired)) for rows in side] for side in sides
            ]

    body = [[Cell(group), *cells] for group, *cells in zip(groups, *columns, strict=True)]
    names = [_named(first), "the same, not annealed"][: len(measured)]
    names += [_named(other) for other in others]
    head = [study.heading, _named(CROSS_ENTROPY, FINAL_LOSS), *names * len(specs)]
    heads = [("", 2), *((spec_title(spec), len(names)) for spec in specs)]
    return Table("End of training", _means_note(groups.values()), head, body, heads)


def _unit(figure: Column) -> tuple[float, str]:
    """Return the factor that values of a figure are shown with, and their unit then."""
    if figure.is_share:
        return 100, "%"
    if figure.unit == NATS and figure not in LOSSES:
        return MILLI, MILLINATS
    return 1, figure.unit


def _named(figure: Column, title: str = "") -> str:
    """Return the title of a figure with the unit of its cells."""
    return ", ".join(filter(None, (title or figure.title, _unit(figure)[1])))


def _shown(figure: Column, value: Bounded | None) -> Cell:
    """Return the cell of a value; digits of losses do not depend on their intervals."""
    return cell(value, _unit(figure)[0], LOSS_DIGITS if figure in LOSSES else None)


def _means_note(groups: Iterable[Sequence[RunSummary]]) -> str:
    counts = sorted({len(ends) for ends in groups} - {1})
    if not counts:
        return ""
    seeds = " or ".join(map(str, counts))
    return f"Means over {seeds} seeds; their intervals hold documents, calibration draws and seeds."


def _mean(rows: Sequence[Row | None], spec: str, figure: Column, paired: Paired) -> Bounded | None:
    """Return the figure of one row, or the mean of those of several seeds; None for missing."""
    column = figure.of(spec)
    measured = [row for row in rows if row is not None and row[column] is not None]
    # One row has its own interval in the table; several need the paired estimate.
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


def heat_tables(study: Study, summaries: Sequence[RunSummary], paired: Paired) -> list[Table]:
    """Return for each spec the error by the first axis and the others; none for one axis.

    Of several seeds it is the mean.
    """
    if len(study.axes) < 2:
        return []

    # one table per spec: the values of the first axis are lines, those of the others columns
    first, *others = study.axes
    ends = grouped(
        summaries, lambda end: (first.text_of(end.run.name), text_of(others, end.run.name))
    )
    heads, columns = (list(dict.fromkeys(values[axis] for values in ends)) for axis in (0, 1))
    groups = [("", 1), (" and ".join(axis.name for axis in others), len(columns))]

    tables, error = [], study.quantization.measures[0]
    for spec in study.quantization.specs:
        means = {
            values_of_end: _mean([end.last for end in of_seeds], spec, error, paired)
            for values_of_end, of_seeds in ends.items()
        }
        largest = max((each.value for each in means.values() if each), default=1.0)
        body = []
        for head in heads:
            line = [Cell(head)]
            for values_of_end in ((head, other) for other in columns):
                value = means.get(values_of_end)
                # Opacity grows with the value, so that the largest one is the darkest.
                shade = DARKEST * value.value / largest if value and largest > 0 else 0.0
                # No such run is an empty cell, a run that is not measured yet says so.
                shown = _shown(error, value) if values_of_end in ends else Cell("")
                line.append(shown._replace(shade=round(max(shade, 0.0), 3)))
            body.append(line)
        title = f"{_capital(error.title)} at the end of training: {spec_title(spec)}"
        note = f"{_capital(_named(error))}. {_means_note(ends.values())}".rstrip()
        tables.append(Table(title, note, [first.name, *columns], body, groups))
    return tables


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def shown_methods(study: Study) -> list[str]:
    """Return every spec of the last checkpoints, by rising number of bits."""
    return sorted(study.quantization.at_the_end, key=lambda spec: parse_spec(spec).bits)


def method_table(study: Study, summaries: Sequence[RunSummary]) -> Table | None:
    """Return a row per method: the error of every run's last checkpoint."""
    if not study.quantization.further:
        return None
    body, error = [], study.quantization.measures[0]
    detailed = _detailed(study, summaries)
    for spec in shown_methods(study):
        values = [bounded(end.last, error.of(spec)) for end in detailed]
        body.append([Cell(spec_title(spec)), *(_shown(error, value) for value in values)])
    note = f"{_capital(_named(error))}, by {study.heading}."
    note += OF_FIRST_SEED if len(detailed) < len(summaries) else ""
    head = ["method", *(end.label for end in detailed)]
    return Table("Methods at the end of training", note, head, body)


def average_table(study: Study, rows: Sequence[Row]) -> Table | None:
    """Return a row per run and compared step of the weights, and of each average up to there."""
    compared = list(compared_models(study, rows))
    if not compared:
        return None

    specs = study.quantization.specs
    figures = dict.fromkeys((QUANTIZED_LOSS, RELATIVE_ERROR, *study.quantization.measures))
    shown = [(CROSS_ENTROPY, specs[0]), *((figure, spec) for spec in specs for figure in figures)]

    body = [
        [
            Cell(label),
            Cell(model),
            *(_shown(figure, bounded(row, figure.of(spec))) for figure, spec in shown),
        ]
        for label, model, row in compared
    ]

    names = [_named(figure) for figure in figures]
    note = (
        "At the end of each phase and of each soup: averages beside the weights of the same step."
    )
    head = [study.heading, "weights", _named(CROSS_ENTROPY, "loss"), *names * len(specs)]
    groups = [("", 3), *((spec_title(spec), len(figures)) for spec in specs)]
    return Table("Averages of weights", note, head, body, groups)


def step_table(study: Study, summaries: Sequence[RunSummary]) -> Table | None:
    """Return a row per spec and run: the terms of the loss increase, and ratios of curvature."""
    if not study.quantization.by_block:
        return None
    body = []
    detailed = _detailed(study, summaries)
    for spec in study.quantization.by_block:
        for end in detailed:
            line = [Cell(end.label), Cell(spec_title(spec))]
            line += [cell(bounded(end.last, term.of(spec)), MILLI) for term in TERMS]
            body.append([*line, *(cell(bounded(end.last, ratio.of(spec))) for ratio in RATIOS)])
    titles = [column.title for column in (*TERMS, *RATIOS)]
    head = [study.heading, "quantization", *titles]
    note = (
        "The step delta goes from the weights at the end of training to the quantized ones. Its"
        " curvature, delta'H delta / |delta|\N{SUPERSCRIPT TWO}, is compared with tr H / N of the"
        " same weights, the mean over random steps, and with the mean over steps of the same"
        " entries with random signs: a ratio to that below 1 means that errors of entries cancel."
        " Intervals are 95%, over microbatches."
    )
    note += OF_FIRST_SEED if len(detailed) < len(summaries) else ""
    groups = [("", 2), (MILLINATS, len(TERMS)), ("curvature", len(RATIOS))]
    return Table("Along the quantization step", note, head, body, groups)
