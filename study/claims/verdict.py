"""A claim and its verdicts; and what judging has in common: the data, counts, numbers in words.

A claim is about every run, or pair of runs. It is supported where each of its comparisons is
significant its way, contradicted where some are significant the other way and none its way, and not
decided otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from base.statistics import holm
from quant_eval.compare import Comparison
from quant_eval.measuring.bootstrap import Resampled
from study.definition import Study
from study.measurements.kind import INTERVAL_LEVEL
from study.measurements.titles import spec_title
from study.results.paired import Paired
from study.results.summary import Rows, RunSummary, summarize
from study.results.table import Row

Pairs = dict[str, tuple[Row, Row]]  # by label
Compared = dict[str, Comparison]
Weighted = list[tuple[Row, float]]  # rows whose figures are summed, each times a factor
Outcome = Literal["supported", "contradicted", "not decided", "not tested"]
FIGURES = {"kl_divergence": "KL divergence", "relative_error": "relative error"}
NAMES = FIGURES | {"cross_entropy_quantized": "quantized loss"}
SIGNIFICANT = ("higher", "lower")  # verdicts; any other is no significant difference
ALPHA = 1 - INTERVAL_LEVEL
MOST_LISTED = 4  # comparisons that are written out one by one


class NotTested(Exception):  # noqa: N818 no error: a verdict
    """The reason why a study does not have the data for a claim."""


class Verdict(NamedTuple):
    """The outcome of a claim by one quantity.

    Attributes:
        outcome: the verdict itself.
        statistic: in words.
        effect: its size in a few words.
        measure: name of the quantity.
    """

    outcome: Outcome
    statistic: str
    effect: str = ""
    measure: str = ""


@dataclass(frozen=True)
class Evidence:
    """A study with its table and its comparisons."""

    study: Study
    rows: Rows
    paired: Paired

    @cached_property
    def ends(self) -> list[RunSummary]:
        """The runs that are ends of training, in order."""
        return summarize(self.study, self.rows)

    @property
    def annealed(self) -> list[RunSummary]:
        """The ends at which the learning rate decays."""
        return [end for end in self.ends if end.anneals]

    def contrast(self, spec: str, figure: str, *parts: Weighted) -> Resampled:
        """The sum of weighted sums of a figure."""
        return self.paired.contrast([one for part in parts for one in part], spec, figure)

    def compared(self, pairs: Pairs, figure: str, spec: str, other: str = "") -> Compared:
        """The second row of each pair against the first; at another spec, where that is given."""
        measured = [((first, spec), (second, other or spec)) for first, second in pairs.values()]
        return dict(zip(pairs, self.paired.compared(measured, figure), strict=True))


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, in our words.

    Attributes:
        place: order in the report.
        name: unique.
        sentence: what is claimed.
        source: where the paper says so.
        needs: what a study must hold to test it.
        judge: gives a verdict for each quantity.
    """

    place: int
    name: str
    sentence: str
    source: str
    needs: str
    judge: Callable[[Evidence], list[Verdict]]


def claim(
    place: int, name: str, sentence: str, *, source: str, needs: str
) -> Callable[[Callable[[Evidence], list[Verdict]]], Claim]:
    """Make a claim of the function that judges it; every one below study/claims is discovered."""
    return lambda judge: Claim(place, name, sentence, source, needs, judge)


def measure_of(spec: str, figure: str) -> str:
    """Return 'KL divergence (GPTQ, 3 bits, groups of 32)'."""
    return f"{FIGURES[figure]} ({spec_title(spec)})"


def judged(measure: str, judge: Callable[..., Verdict], *arguments: Any) -> Verdict:
    """Return what `judge` makes of its arguments under the name of the quantity."""
    try:
        return judge(*arguments)._replace(measure=measure)
    except NotTested as reason:
        return Verdict("not tested", str(reason), measure=measure)


def by_measure(
    judge: Callable[[Evidence, str, str], Verdict],
) -> Callable[[Evidence], list[Verdict]]:
    """Judge each figure at each spec that all checkpoints are quantized with."""
    return lambda evidence: [
        judged(measure_of(spec, figure), judge, evidence, spec, figure)
        for spec in evidence.study.quantization.specs
        for figure in FIGURES
    ]


def needed(what: str, row: Row | None, *columns: str) -> Row:
    """Return a row; NotTested where it, or one of the columns in it, is not measured."""
    if row is None:
        raise NotTested(f"missing: {what} has no checkpoint yet")
    for column in columns:
        if row.get(column) is None:
            raise NotTested(f"missing: {column} of {what} is not measured")
    return row


def end_of(end: RunSummary, *columns: str) -> Row:
    """Return the row of the end of training; NotTested where one of these is not measured."""
    return needed(f"the end of {end.label}", end.last, *columns)


def decided(agreeing: int, opposing: int, count: int) -> Outcome:
    """Return the outcome of so many comparisons."""
    if agreeing == count:
        return "supported"
    return "contradicted" if opposing and not agreeing else "not decided"


def way_of(value: float, p_value: float) -> str:
    """Return how a value is to 0: higher, lower, or not significantly different."""
    return "no significant difference" if p_value > ALPHA else "higher" if value > 0 else "lower"


def outcome_of(verdicts: Sequence[str], claimed: str) -> Outcome:
    """Return the outcome of comparisons that are all claimed to be 'higher' or 'lower'."""
    against = "lower" if claimed == "higher" else "higher"
    return decided(verdicts.count(claimed), verdicts.count(against), len(verdicts))


def all_claimed(found: Compared, claimed: str, figure: str, what: str) -> Verdict:
    """Judge comparisons whose second is claimed to be higher or lower than the first."""
    outcome = outcome_of([one.verdict for one in found.values()], claimed)
    effect = spread([one.difference.value for one in found.values()], figure)
    return Verdict(outcome, counted(found, claimed, figure, what), effect)


def counted(found: Compared, claimed: str, figure: str, what: str) -> str:
    """Count the comparisons that are significant each way, with their differences."""
    against = "lower" if claimed == "higher" else "higher"
    verdicts: list[str] = [one.verdict for one in found.values()]
    head = (
        f"significantly {claimed} in {verdicts.count(claimed)} of {len(verdicts)} {what},"
        f" {against} in {verdicts.count(against)} (paired over documents, Holm): "
    )
    if len(found) <= MOST_LISTED:
        return head + "; ".join(
            f"{label}: {signed(one.difference.value, figure)}"
            f" [{signed(one.difference.low, figure)}, {signed(one.difference.high, figure)}], p"
            f" {one.p_adjusted:.2g}"
            for label, one in found.items()
        )
    values = sorted(one.difference.value for one in found.values())
    p_values = [one.p_adjusted for one in found.values()]
    return (
        f"{head}differences {signed(values[0], figure)} to {signed(values[-1], figure)},"
        f" p {min(p_values):.2g} to {max(p_values):.2g}"
    )


def signed(value: float, figure: str) -> str:
    """Return a difference of figures with its unit.

    >>> signed(0.00123, "relative_error"), signed(-0.00123, "kl_divergence")
    ('+0.123%', '-0.00123')
    """
    return f"{100 * value:+.3g}%" if figure == "relative_error" else f"{value:+.3g}"


def spread(values: Sequence[float], figure: str) -> str:
    """Return the range of some values with their unit."""
    low, high = signed(min(values), figure), signed(max(values), figure)
    return low if low == high else f"{low} to {high}"


def estimated(resampled: Resampled, figure: str) -> str:
    """Return a contrast with its interval."""
    low, high = (signed(end, figure) for end in resampled.interval(INTERVAL_LEVEL))
    return f"{signed(resampled.value, figure)} [{low}, {high}]"


def significant_above(contrasts: Sequence[Sequence[Resampled]], one_sided: bool) -> list[bool]:
    """Return for each group of contrasts whether all are significantly above 0.

    Holm's correction is over the groups. The largest p-value of a group decides without a further
    correction (Berger 1982, intersection-union test). Where the data chose the direction the
    p-values are two-sided.
    """
    factor = 1 if one_sided else 2

    def p_above(contrast: Resampled) -> float:
        half = contrast.p_value() / 2
        return half if contrast.value > 0 else 1 - half

    p_values = [min(1.0, factor * max(map(p_above, group))) for group in contrasts]
    return [p <= ALPHA for p in holm(p_values)]
