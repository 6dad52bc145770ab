"""A claim and its verdicts; and what judging has in common: the data, counts, numbers in words.

A claim is about every run, or pair of runs. It is supported where each of its comparisons is
significant its way, contradicted where some are significant the other way and none its way, and not
decided otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from base.statistics import holm, verdict_of
from quant_eval.compare import Comparison
from quant_eval.measuring.bootstrap import Resampled
from study.definition import Study
from study.measurements.kind import INTERVAL_LEVEL
from study.measurements.titles import spec_title
from study.results.paired import Key, Paired, Pairs
from study.results.summary import Rows, RunSummary, summarize
from study.results.table import Row

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


@dataclass(frozen=True)
class Measure:
    """A figure at a spec, by which a claim is judged, with its comparisons and numbers in words."""

    evidence: Evidence
    spec: str
    figure: str

    @property
    def column(self) -> str:
        """The column of the table."""
        return f"quant/{self.spec}/{self.figure}"

    @property
    def title(self) -> str:
        """The name in words: 'KL divergence (GPTQ, 3 bits, groups of 32)'."""
        return f"{NAMES[self.figure]} ({spec_title(self.spec)})"

    def of(self, *, spec: str = "", figure: str = "") -> "Measure":
        """Return another figure at this spec, or this figure at another spec."""
        return Measure(self.evidence, spec or self.spec, figure or self.figure)

    def contrast(self, *parts: Weighted) -> Resampled:
        """Return the sum of weighted sums of the figure."""
        weighted = [one for part in parts for one in part]
        return self.evidence.paired.contrast(weighted, self.spec, self.figure)

    def compared(self, pairs: Pairs[Key], second_spec: str = "") -> dict[Key, Comparison]:
        """Return the second row of each pair against the first; at another spec, if given."""
        return self.evidence.paired.compared(pairs, self.figure, self.spec, second_spec)

    def signed(self, value: float) -> str:
        """Return a difference with its unit: '+0.123%' of relative errors, else '-0.00123'."""
        is_share = self.figure == "relative_error"
        return f"{100 * value:+.3g}%" if is_share else f"{value:+.3g}"

    def spread(self, values: Sequence[float]) -> str:
        """Return the range of some values with their unit."""
        low, high = self.signed(min(values)), self.signed(max(values))
        return low if low == high else f"{low} to {high}"

    def estimated(self, resampled: Resampled) -> str:
        """Return a contrast with its interval."""
        low, high = map(self.signed, resampled.interval(INTERVAL_LEVEL))
        return f"{self.signed(resampled.value)} [{low}, {high}]"

    def all_claimed(self, found: Mapping[Any, Comparison], claimed: str, what: str) -> Verdict:
        """Judge comparisons whose second is claimed to be higher or lower than the first."""
        outcome = outcome_of([one.verdict for one in found.values()], claimed)
        effect = self.spread([one.difference.value for one in found.values()])
        return Verdict(outcome, self.counted(found, claimed, what), effect)

    def counted(self, found: Mapping[Any, Comparison], claimed: str, what: str) -> str:
        """Count the comparisons that are significant each way, with their differences."""
        against = "lower" if claimed == "higher" else "higher"
        verdicts: list[str] = [one.verdict for one in found.values()]
        head = (
            f"significantly {claimed} in {verdicts.count(claimed)} of {len(verdicts)} {what},"
            f" {against} in {verdicts.count(against)} (paired over documents, Holm): "
        )
        if len(found) <= MOST_LISTED:
            return head + "; ".join(
                f"{label}: {self.signed(one.difference.value)} [{self.signed(one.difference.low)},"
                f" {self.signed(one.difference.high)}], p {one.p_adjusted:.2g}"
                for label, one in found.items()
            )
        values = sorted(one.difference.value for one in found.values())
        p_values = [one.p_adjusted for one in found.values()]
        return (
            f"{head}differences {self.signed(values[0])} to {self.signed(values[-1])},"
            f" p {min(p_values):.2g} to {max(p_values):.2g}"
        )

    def end(self, end: RunSummary, *others: str) -> Row:
        """Return the row of the end of training; NotTested where a column is not measured."""
        return needed(f"the end of {end.label}", end.last, self.column, *others)

    def both_ends(self, *others: str) -> dict[str, tuple[Row, Row]]:
        """Return label -> rows before and after the decay; NotTested where a column is missing."""
        pairs = {
            end.label: (
                needed(f"{end.label} before the decay", end.first, self.column, *others),
                self.end(end, *others),
            )
            for end in self.evidence.annealed
        }
        if not pairs:
            raise NotTested("no run's learning rate decays after a checkpoint at a higher one")
        return pairs


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


def judged(title: str, judge: Callable[..., Verdict], *arguments: Any) -> Verdict:
    """Return what `judge` makes of its arguments under the name of the quantity."""
    try:
        return judge(*arguments)._replace(measure=title)
    except NotTested as reason:
        return Verdict("not tested", str(reason), measure=title)


def measures(evidence: Evidence, specs: Sequence[str]) -> list[Measure]:
    """Return every figure at each of these specs."""
    return [Measure(evidence, spec, figure) for spec in specs for figure in FIGURES]


def by_measure(judge: Callable[[Measure], Verdict]) -> Callable[[Evidence], list[Verdict]]:
    """Judge each figure at each spec that all checkpoints are quantized with."""
    return lambda evidence: [
        judged(one.title, judge, one)
        for one in measures(evidence, evidence.study.quantization.specs)
    ]


def needed(what: str, row: Row | None, *columns: str) -> Row:
    """Return a row; NotTested where it, or one of the columns in it, is not measured."""
    if row is None:
        raise NotTested(f"missing: {what} has no checkpoint yet")
    for column in columns:
        if row.get(column) is None:
            raise NotTested(f"missing: {column} of {what} is not measured")
    return row


def decided(agreeing: int, opposing: int, count: int) -> Outcome:
    """Return the outcome of so many comparisons."""
    if agreeing == count:
        return "supported"
    return "contradicted" if opposing and not agreeing else "not decided"


def outcome_of(verdicts: Sequence[str], claimed: str) -> Outcome:
    """Return the outcome of comparisons that are all claimed to be 'higher' or 'lower'."""
    against = "lower" if claimed == "higher" else "higher"
    return decided(verdicts.count(claimed), verdicts.count(against), len(verdicts))


def against_zero(contrasts: Sequence[Resampled]) -> tuple[list[str], list[float]]:
    """Return the verdict on each contrast, and its p-value by Holm's correction over them."""
    p_values = holm([one.p_value() for one in contrasts])
    pairs = zip(contrasts, p_values, strict=True)
    return [verdict_of(one.value, p, INTERVAL_LEVEL) for one, p in pairs], p_values


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
