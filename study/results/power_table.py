"""The comparisons of a study with what would decide them, as a table of text."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from base.errors import UserError
from quant_eval.estimate import DRAWS, Effect
from study.definition import Study
from study.measurements.titles import spec_title
from study.results.paired import Paired, Weighted
from study.results.power import MOST_SEEDS, POWER, Components, components_of
from study.results.summary import Rows, RunSummary, summarize

FIGURES = {"kl_divergence": "KL divergence", "relative_error": "relative error"}
ROUNDING = 1e-8  # of the largest variance: none
MORE_DOCUMENTS, DRAWS_SHOWN = (1, 2, 4), (3, 5, 10)


def power_lines(study: Study, rows: Rows, paired: Paired, share: float) -> Iterator[str]:
    """Yield a table per figure and comparison, for a difference of that share of the figure.

    Raises:
        UserError: nothing is compared over two seeds yet.
    """
    spec, ends = study.quantization.specs[0], summarize(study, rows)
    compared = _compared(ends, f"quant/{spec}/kl_divergence")
    if not compared:
        raise UserError(
            f"{study.name} has no comparison of the ends of two seeds yet; give its recipe"
            " seeds=(1, 2) or more, and run it"
        )
    for what, comparisons in compared.items():
        for figure, title in FIGURES.items():
            column = f"quant/{spec}/{figure}"
            every = [
                row for comparison in comparisons for weighted in comparison for row, _ in weighted
            ]
            size = abs(float(np.mean([row[column] for row in every])))
            components = components_of(
                [paired.crossed(comparison, spec, figure) for comparison in comparisons]
            )
            yield f"{title} ({spec_title(spec)}), {what}: {share:.0%} of {size:.4g}"
            yield from _table(components, share * size, size)


def _compared(ends: Sequence[RunSummary], column: str) -> dict[str, list[list[Weighted]]]:
    """Return the comparisons of at least two seeds by their kind, each with its replicates."""
    groups: dict[str, list[RunSummary]] = {}
    for end in ends:
        if end.last is not None and end.last.get(column) is not None:
            groups.setdefault(end.group, []).append(end)

    # a comparison for each seed, by group or by neighbouring groups
    annealed, neighbours = list[list[Weighted]](), list[list[Weighted]]()
    for members in groups.values():
        annealed.append(
            [
                [(end.last, 1.0), (end.control, -1.0)]
                for end in members
                if end.last and end.control and end.control.get(column) is not None
            ]
        )
    for first, second in pairwise(groups.values()):
        neighbours.append(
            [
                [(two.last, 1.0), (earlier.last, -1.0)]
                for earlier, two in zip(first, second, strict=False)
                if earlier.last and two.last
            ]
        )

    # one seed shows no spread
    by_question = {
        "annealed against its control": annealed,
        "one setting against the next": neighbours,
    }
    several = {
        what: [comparison for comparison in comparisons if len(comparison) > 1]
        for what, comparisons in by_question.items()
    }
    return {what: comparisons for what, comparisons in several.items() if comparisons}


def _percent(share: float) -> str:
    """Return a share with two digits, such as 6.5% or 150%."""
    return f"{share:.0%}" if share >= 0.1 else f"{100 * share:.2g}%"


def _table(components: Components, difference: float, size: float) -> Iterator[str]:
    seeds, documents, draws = at_hand = components.plan
    least = ROUNDING * max(components.variances.values())
    deviations = ", ".join(
        f"{_named(effect)} {_percent(variance**0.5 / size)}"
        for effect, variance in components.variances.items()
        if variance > least
    )
    yield f"  standard deviation by source: {deviations or 'none'}"
    error = components.estimate(difference, at_hand).standard_error
    yield (
        f"  {seeds} seeds, {documents} documents and {draws} draws, as at hand: standard error"
        f" {_percent(error / size)}, power {components.power(difference, at_hand):.0%}"
    )
    several = frozenset({DRAWS}) in components.variances
    columns = sorted({draws, *DRAWS_SHOWN}) if several else [draws]
    heads = "".join(f"{f'{count} draws':>10}" for count in columns) if several else "     seeds"
    yield f"  seeds for {POWER:.0%} power{heads}"
    for count in (times * documents for times in MORE_DOCUMENTS):
        seeds_needed = [components.least_seeds(difference, count, column) for column in columns]
        cells = "".join(f"{count or f'>{MOST_SEEDS}':>10}" for count in seeds_needed)
        yield f"  {f'{count:,} documents':>19}{cells}"


def _named(effect: Effect) -> str:
    return " x ".join(sorted(effect, reverse=True))
