"""The first tables of a report: the effect of each factor of the study at the end of training."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from base.statistics import INTERVAL_LEVEL
from dynamics.claims.verdict import FIGURES, signed
from study.axes import Axis
from study.definition import Study
from study.measurements.titles import spec_title
from study.report.cells import MISSING, Cell, Table
from study.results.effects import LOSS, Effect, Measured, measures
from study.results.summary import enumeration

UNITS = {LOSS: "nats per token", "kl_divergence": "nats per token", "relative_error": "%"}
NAMES = {LOSS: "final loss"} | FIGURES
WIDTH = 110


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
    names = [f"{NAMES[figure]}, {UNITS[figure]}" for _, figure in measures(study)]
    head = [axis.title, *names, "pairs of runs"]
    groups = [("", 2), *((spec_title(spec), 2) for spec in study.quantization.specs), ("", 1)]
    return Table(
        f"Effect of {axis.name} at the end", _note(study, axis, effects), head, body, groups
    )


def _cell(effect: Effect | None) -> Cell:
    """Return the difference as the claims show theirs, with its interval and p-value."""
    if effect is None:
        return Cell(MISSING)
    estimate, figure = effect.estimate, effect.measure.figure
    values = (estimate.value, *estimate.interval())
    scale = 100 if figure == "relative_error" else 1
    text, low, high = (signed(value, figure) for value in values)
    p = f"p {estimate.p_value():.2g}" + ("" if estimate.holds_seeds else "*")
    numbers = (*(scale * value for value in values), estimate.p_value())
    return Cell(text, f"[{low}, {high}], {p}", numbers=numbers)


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


def effects_text(tables: Sequence[Table]) -> Iterator[str]:
    """Yield the tables as plain text: a paragraph per comparison, a line per measure."""
    for table in tables:
        yield table.title
        for line in table.body:
            yield f"{line[0].text}:"
            names = table.columns[1:-1]
            width = max(map(len, names))
            for name, cell in zip(names, line[1:-1], strict=True):
                yield f"  {name:{width}}  {cell.text} {cell.interval}".rstrip()
        yield from textwrap.wrap(table.note, WIDTH)
        yield ""
