"""What is said of a claim, and what every judgement shares: the data, counts of comparisons, numbers in words.

A claim says something of every run, or pair of runs. It is supported where each of its comparisons is told apart the
way it says, contradicted where some are told apart the other way and none its way, and not decided otherwise.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from ckpt_tools.holm import holm
from quant_eval.bootstrap import Resampled
from study.paired import Measured, Paired, Row
from study.settings import Study, spec_title
from study.steps import INTERVAL_LEVEL
from study.summary import Rows, RunSummary, summarize

Weighted = list[tuple[Row, float]]  # rows whose figures are summed, each times a factor
Outcome = Literal["supported", "contradicted", "not decided", "not tested"]
FIGURES = {"relative_error": "relative error", "kl_divergence": "KL divergence"}
NAMES = FIGURES | {"cross_entropy_quantized": "quantized loss"}
ALPHA = 1 - INTERVAL_LEVEL
MOST_LISTED = 4  # comparisons that are written out one by one


class Judged(NamedTuple):
    """An outcome with its statistic in words."""

    outcome: Outcome
    statistic: str


@dataclass(frozen=True)
class Verdict:
    """What one quantity says of a claim; `measure` names it."""

    measure: str
    outcome: Outcome
    statistic: str


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

    def contrast(self, spec: str, figure: str, *parts: Weighted) -> Resampled:
        """The sum of weighted sums of a figure."""
        return self.paired.contrast([one for part in parts for one in part], spec, figure)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, in our words.

    Attributes:
        name: unique.
        sentence: what is claimed.
        source: where the paper says so.
        needs: what a study must hold to test it.
        judge: says what the data of a study tell of it.
    """

    name: str
    sentence: str
    source: str
    needs: str
    judge: Callable[[Evidence], list[Verdict]]


class _Difference(Protocol):
    """Of quantizations or traces: second minus first."""

    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


class Shown(NamedTuple):
    """One comparison, as far as it is told of."""

    label: str
    difference: _Difference
    p_adjusted: float
    verdict: str


def measure_of(spec: str, figure: str) -> str:
    """'KL divergence (GPTQ, 3 bits, groups of 32)'."""
    return f"{FIGURES[figure]} ({spec_title(spec)})"


def by_measure(judge: Callable[[Evidence, str, str], Judged]) -> Callable[[Evidence], list[Verdict]]:
    """A verdict for each figure at each spec that all checkpoints are quantized with."""

    def judged(evidence: Evidence) -> list[Verdict]:
        specs = evidence.study.quantization.specs
        return [
            Verdict(measure_of(spec, figure), *judge(evidence, spec, figure)) for spec in specs for figure in FIGURES
        ]

    return judged


def not_tested(reason: str) -> Judged:
    """The study has no data for the claim."""
    return Judged("not tested", reason)


def missing(wanted: Iterable[tuple[str, Row | None, str]]) -> str | None:
    """Names the first of (what, its row, column) that is not measured; None where all are."""
    for what, row, column in wanted:
        if row is None:
            return f"missing: {what} has no checkpoint yet"
        if row.get(column) is None:
            return f"missing: {column} of {what} is not measured"
    return None


def outcome_of(verdicts: Sequence[str], claimed: str) -> Outcome:
    """Of comparisons that the claim says are all `claimed`: 'higher' or 'lower'."""
    against = "lower" if claimed == "higher" else "higher"
    if all(verdict == claimed for verdict in verdicts):
        return "supported"
    return "contradicted" if against in verdicts and claimed not in verdicts else "not decided"


def compared(
    evidence: Evidence, pairs: dict[str, tuple[Measured, Measured]], figure: str, claimed: str, what: str
) -> Judged:
    """Labelled pairs that the claim says have the second `claimed`, paired over documents with Holm's correction."""
    found = evidence.paired.compared(list(pairs.values()), figure)
    shown = [Shown(label, one.difference, one.p_adjusted, one.verdict) for label, one in zip(pairs, found, strict=True)]
    return Judged(outcome_of([one.verdict for one in shown], claimed), counted(shown, claimed, figure, what))


def counted(shown: Sequence[Shown], claimed: str, figure: str, what: str, unit: str = "paired over documents") -> str:
    """How many comparisons are told apart each way, with their differences."""
    against = "lower" if claimed == "higher" else "higher"
    told = {word: sum(one.verdict == word for one in shown) for word in (claimed, against)}
    head = f"told {claimed} in {told[claimed]} of {len(shown)} {what}, {against} in {told[against]}"
    if len(shown) <= MOST_LISTED:
        parts = [
            f"{one.label}: {signed(one.difference.value, figure)} "
            f"[{signed(one.difference.low, figure)}, {signed(one.difference.high, figure)}], p {one.p_adjusted:.2g}"
            for one in shown
        ]
        return f"{head} ({unit}, Holm): {'; '.join(parts)}"
    values = sorted(one.difference.value for one in shown)
    p_values = [one.p_adjusted for one in shown]
    return (
        f"{head} ({unit}, Holm): differences {signed(values[0], figure)} to {signed(values[-1], figure)}, "
        f"p {min(p_values):.2g} to {max(p_values):.2g}"
    )


def signed(value: float, figure: str) -> str:
    """A difference of figures with its unit.

    >>> signed(0.00123, "relative_error"), signed(-0.00123, "kl_divergence")
    ('+0.123%', '-0.00123')
    """
    return f"{100 * value:+.3g}%" if figure == "relative_error" else f"{value:+.3g}"


def estimated(resampled: Resampled, figure: str) -> str:
    """A contrast with its interval."""
    low, high = (signed(end, figure) for end in resampled.interval(INTERVAL_LEVEL))
    return f"{signed(resampled.value, figure)} [{low}, {high}]"


def p_above(resampled: Resampled) -> float:
    """One-sided p-value of the contrast not being above 0."""
    half = resampled.p_value() / 2
    return half if resampled.value > 0 else 1 - half


def told_above(contrasts: Sequence[Sequence[Resampled]], one_sided: bool) -> list[bool]:
    """Of each group of contrasts whether all are above 0; Holm's correction is over the groups.

    That all hold is told by the largest p-value (Berger 1982, intersection-union test) without a further correction.
    Where the data chose the direction the p-values are two-sided.
    """
    factor = 1 if one_sided else 2
    p_values = [min(1.0, factor * max(p_above(one) for one in group)) for group in contrasts]
    return [p <= ALPHA for p in holm(p_values)]
