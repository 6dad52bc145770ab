"""The seeds, documents and calibration draws that decide a difference, from those at hand.

Shapes: S seeds, D documents, K calibration draws.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.special import nctdtr, stdtrit

from base.aligned import aligned, wrapped
from base.errors import UserError
from base.grouping import grouped
from base.quantities import MILLINATS, significant
from base.statistics import INTERVAL_LEVEL
from quant_eval.estimate import (
    AXES,
    DOCUMENTS,
    DRAWS,
    SEEDS,
    Crossed,
    Effect,
    Estimate,
    MeanSquare,
    effects_of,
    mean_squares,
    sources_of,
)
from study.definition import Study
from study.measurements.kind import Column
from study.measurements.quantization import DIVERGENCE, ERRORS
from study.measurements.titles import spec_title
from study.results.paired import Paired, Weighted, runs_of
from study.results.summary import Rows, RunSummary, left_out, summarize

POWER = 0.8
MOST_SEEDS = 30  # that a table looks for
LARGE = 1e6  # degrees of freedom from which Student's t is normal


class PowerPlan(NamedTuple):
    """The size of a study."""

    seeds: int
    documents: int
    draws: int

    @property
    def counts(self) -> dict[str, int]:
        """The numbers by factor."""
        return {SEEDS: self.seeds, DOCUMENTS: self.documents, DRAWS: self.draws}


@dataclass(frozen=True)
class Components:
    """The variances of a value for one seed, document and draw, by effect; at least 0.

    Attributes:
        plan: the study that they are from.
        variances: of the random effects of the three factors and of their interactions.
        evenness: documents of equal length that tell as much as one of the study's.
    """

    plan: PowerPlan
    variances: Mapping[Effect, float]
    evenness: float

    def estimate(self, difference: float, plan: PowerPlan) -> Estimate:
        """Return the estimate of a difference as a study of this size would have it.

        Its sources are those of the expected mean squares.
        """
        counts = plan.counts
        # Documents of unequal length tell less than their number: the effective one counts here.
        degrees = counts | {DOCUMENTS: self.evenness * plan.documents}
        adds = {
            effect: variance / math.prod(counts[name] for name in effect)
            for effect, variance in self.variances.items()
        }
        squares = {
            effect: MeanSquare(
                # Expected mean square: its own variance and those of interactions that hold it.
                math.fsum(part for other, part in adds.items() if effect <= other),
                # Degrees of freedom of an interaction are the product of those of its factors.
                math.prod(degrees[name] - 1 for name in effect),
            )
            for effect in effects_of(name for name in AXES if counts[name] > 1)
        }
        return Estimate(difference, sources_of(squares))

    def power(self, difference: float, plan: PowerPlan) -> float:
        """Return how likely a study of this size finds the difference significant.

        The test statistic has a noncentral t distribution whose noncentrality is difference /
        standard error (Cohen 1988, "Statistical Power Analysis", chapter 2).

        Example: a difference as large as the deviation between seeds; 80% take ten of them.
            >>> variances = {frozenset({SEEDS}): 1.0}
            >>> components = Components(PowerPlan(2, 100, 1), variances, evenness=1.0)
            >>> [round(components.power(1.0, PowerPlan(seeds, 100, 1)), 2) for seeds in (5, 10)]
            [0.4, 0.8]
        """
        estimate = self.estimate(difference, plan)
        if estimate.standard_error == 0:
            return 1.0
        degrees = min(estimate.degrees_of_freedom, LARGE)
        critical = stdtrit(degrees, (1 + INTERVAL_LEVEL) / 2)
        # The noncentrality: how many standard errors the true difference is away from 0.
        shift = abs(difference) / estimate.standard_error
        if shift > 2 * critical + 10:  # where the distribution function has no digits left
            return 1.0
        return float(1 - nctdtr(degrees, shift, critical) + nctdtr(degrees, shift, -critical))

    def least_seeds(self, difference: float, documents: int, draws: int) -> int | None:
        """Return the smallest number of seeds that decides the difference; None above the most."""
        return next(
            (
                seeds
                for seeds in range(2, MOST_SEEDS + 1)
                if self.power(difference, PowerPlan(seeds, documents, draws)) >= POWER
            ),
            None,
        )


def components_of(several: Sequence[Crossed]) -> Components:
    """Return the mean components of figures that were measured alike.

    An effect's variance is what its mean square has beyond the interactions that hold it:
    sum over effects f that contain e of (-1)^(|f| - |e|) m_f, times the number of its values.

    Raises:
        UserError: there is one seed, or other numbers of documents or draws.

    Example: seeds 1.5 and 3.5, documents 2 and 3, nothing else.
        >>> import numpy as np
        >>> components = components_of([Crossed(np.array([[[1.0], [2.0]], [[3.0], [4.0]]]))])
        >>> list(components.variances.values())  # seeds, documents, both
        [2.0, 0.5, 0.0]
    """
    shapes = {crossed.values_SDK.shape[1:] for crossed in several}
    if len(shapes) > 1:
        raise UserError("the models are measured on other documents or draws; run the study again")
    seeds = min(len(crossed.values_SDK) for crossed in several)
    if seeds < 2:
        raise UserError(
            "one seed does not show what another would change; give the recipe seeds=(1, 2) or more"
        )

    # summed over the figures: what each effect's mean square has of its own
    plan = PowerPlan(seeds, *shapes.pop())
    sums: dict[Effect, float] = {}
    for crossed in several:
        squares = mean_squares(crossed)
        counts = PowerPlan(*crossed.values_SDK.shape).counts
        for effect in squares:
            part = math.fsum(
                # Inclusion and exclusion takes the interactions out of the mean square again.
                (-1) ** (len(other) - len(effect)) * square.variance
                for other, square in squares.items()
                if effect <= other
            )
            # A mean square here is that of the mean: times the number of values, of a single one.
            values = math.prod(counts[name] for name in effect)
            # A negative part is kept here: only the mean over all figures is cut at 0.
            sums[effect] = sums.get(effect, 0.0) + part * values
    return Components(
        plan,
        {effect: max(0.0, total / len(several)) for effect, total in sums.items()},
        evenness=several[0].equal_documents / plan.documents,
    )


ROUNDING = 1e-8  # of the largest variance: none
MORE_DOCUMENTS, DRAWS_SHOWN = (1, 2, 4), (3, 5, 10)


class Question(NamedTuple):
    """A comparison with a figure, and what a difference of a share of the figure takes.

    Attributes:
        what: is compared, in words.
        figure: by which.
        size: the figure itself, in the mean.
        difference: to be decided.
        components: the variances that the comparisons over seeds show.
        left_out: in words, the runs without a partner.
    """

    what: str
    figure: Column
    size: float
    difference: float
    components: Components
    left_out: list[str]

    def seeds(self, more_documents: int = 1, draws: int | None = None) -> str:
        """Return the seeds that decide it, in words; at the draws at hand by default."""
        plan = self.components.plan
        least = self.components.least_seeds(
            self.difference, more_documents * plan.documents, draws or plan.draws
        )
        return str(least or f">{MOST_SEEDS}")


def power_lines(
    study: Study, rows: Rows, paired: Paired, share: float, *, whole: bool = False
) -> Iterator[str]:
    """Yield the seeds that a difference of that share of a figure takes, then a table of them.

    `whole` is with the variances of every figure.

    Raises:
        UserError: as `_questions`.
    """
    questions = list(_questions(study, rows, paired, share))
    shown = [question for question in questions if question.figure == ERRORS[0]]
    plan, spec = shown[0].components.plan, spec_title(study.quantization.specs[0])
    answers = [f"{question.seeds()} seeds ({question.what})" for question in shown]
    yield from wrapped(
        f"a difference of {100 * share:g}% takes {', '.join(answers)}; {study.name} has"
        f" {plan.seeds}"
    )
    yield ""
    yield from overview(shown)
    yield from wrapped(
        f"seeds for {POWER:.0%} power at p {1 - INTERVAL_LEVEL:.2g}, of the {shown[0].figure.title}"
        f" ({spec}); it is in {MILLINATS}; now: {plan.seeds} seeds, {plan.documents} documents,"
        f" {plan.draws} calibration draws"
    )
    for words in dict.fromkeys(words for question in shown for words in question.left_out):
        yield from wrapped(words)
    if not whole:
        yield "--all adds other errors, the variance by source, and every number of documents"
        return
    for question in questions:
        yield ""
        yield f"{question.figure.title} ({spec}), {question.what}: {100 * share:g}% of" + (
            f" {significant(question.figure.difference_scale * question.size)}"
            f" {question.figure.difference_unit}"
        )
        yield from _table(question.components, question.difference, question.size)
        yield from (f"  {words}" for words in question.left_out)


def overview(questions: Sequence[Question]) -> Iterator[str]:
    """Yield a line per comparison: the figure, the power at hand, and the seeds that decide."""
    plan = questions[0].components.plan
    # Draws matter to methods that calibrate alone.
    several = frozenset({DRAWS}) in questions[0].components.variances
    most = DRAWS_SHOWN[-1]
    head = ["comparison", "figure", "power now", "seeds", f"with {MORE_DOCUMENTS[-1]}x documents"]
    rows = [head + [f"with {most} draws"] * several]
    for each in questions:
        power = each.components.power(each.difference, plan)
        figure = significant(each.figure.difference_scale * each.size)
        cells = [each.what, figure, f"{power:.0%}", each.seeds(), each.seeds(MORE_DOCUMENTS[-1])]
        rows.append(cells + [each.seeds(draws=most)] * several)
    yield from aligned(rows, right={1, 2, 3, 4, 5})


def _questions(study: Study, rows: Rows, paired: Paired, share: float) -> Iterator[Question]:
    """Yield every comparison with every figure.

    Raises:
        UserError: nothing is compared over two seeds yet.
    """
    spec = study.quantization.specs[0]
    # KL divergence says which ends are measured; relative errors come with it.
    column = DIVERGENCE.of(spec)
    ends = [end for end in summarize(study, rows) if end.last and end.last[column] is not None]
    compared = _compared(ends, column)
    if not compared:
        raise UserError(
            f"{study.name} has no comparison of the ends of two seeds yet; give its recipe"
            " seeds=(1, 2) or more, and run it"
        )
    for what, comparisons in compared.items():
        for figure in ERRORS:
            every = [
                row for comparison in comparisons for weighted in comparison for row, _ in weighted
            ]
            # The difference looked for is a share of the mean figure.
            size = abs(float(np.mean([row[figure.of(spec)] for row in every])))
            components = components_of(
                [paired.crossed(comparison, spec, figure) for comparison in comparisons]
            )
            lacking = [left_out(ends, runs_of(each)) for each in comparisons]
            lacking = [*dict.fromkeys(filter(None, lacking))]
            yield Question(what, figure, size, share * size, components, lacking)


def _compared(ends: Sequence[RunSummary], column: str) -> dict[str, list[list[Weighted]]]:
    """Return the comparisons of at least two seeds by their kind, each with its replicates.

    `ends` are those that have the column.
    """
    groups = grouped(ends, lambda end: end.group)

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
        earlier = {end.seed: end.last for end in first}
        neighbours.append(
            [
                [(end.last, 1.0), (partner, -1.0)]
                for end in second
                if end.last and (partner := earlier.get(end.seed))
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
    # Variances below this are rounding errors of differences and not shown.
    least = ROUNDING * max(components.variances.values())
    deviations = ", ".join(
        f"{_named(effect)} {_percent(variance**0.5 / size)}"
        for effect, variance in components.variances.items()
        if variance > least
    )
    yield from wrapped(f"  standard deviation by source: {deviations or 'none'}")
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
