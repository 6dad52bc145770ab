"""A claim and its verdicts, and what judging has in common: the data, and numbers in words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from base.grouping import grouped
from base.quantities import significant
from base.statistics import INTERVAL_LEVEL
from quant_eval.estimate import Estimate
from quant_eval.specs import parse_spec
from study.axes import AnyRun
from study.definition import Study
from study.experiments import Experiment
from study.measurements.kind import Column
from study.measurements.quantization import ERRORS
from study.measurements.titles import spec_title
from study.results.collect import diverged_runs
from study.results.paired import Paired, Weighted
from study.results.summary import DECAYED, Rows, RunSummary, summarize
from study.results.table import Row
from train.run.config import RunConfig
from train.run.schedules import learning_rate

Outcome = Literal["supported", "contradicted", "not decided", "not tested"]
Replicates = dict[int | None, Weighted]  # a sum of rows by seed; None of a released model
# What a verdict says where its test holds for these trainings alone.
OF_THESE_RUNS = {"supported": "holds in these runs", "contradicted": "fails in these runs"}
ALPHA = 1 - INTERVAL_LEVEL


class NotTested(Exception):  # noqa: N818 not an error but a verdict
    """The reason why a study does not have the data for a claim."""


def in_words(outcome: str, *, holds_seeds: bool) -> str:
    """Return a verdict in words: of single trainings none is supported or contradicted.

    >>> in_words("supported", holds_seeds=True), in_words("supported", holds_seeds=False)
    ('supported', 'holds in these runs')
    """
    return outcome if holds_seeds else OF_THESE_RUNS.get(outcome, outcome)


class Verdict(NamedTuple):
    """The outcome of a claim by one quantity.

    Attributes:
        outcome: the verdict itself.
        statistic: in words.
        effect: its size with an interval, in words; in 10^-3 nats/token unless it says otherwise.
        p: p-value of the test, without a correction for other claims; None where nothing is tested.
        runs: how many runs go the way of the effect, in words: '3 of 4 higher'.
        against: the strongest observation the other way, in words; empty where there is none.
        holds_seeds: the p-value and the interval are for other seeds too.
        measure: name of the quantity.
        why: a sentence where some of the runs show nothing alone and the mean over all decides;
            empty elsewhere.
    """

    outcome: Outcome
    statistic: str
    effect: str = ""
    p: float | None = None
    runs: str = ""
    against: str = ""
    holds_seeds: bool = False
    measure: str = ""
    why: str = ""

    @property
    def words(self) -> str:
        """The outcome as it is shown."""
        return in_words(self.outcome, holds_seeds=self.holds_seeds)


@dataclass(frozen=True)
class Evidence:
    """A study, or an experiment of one, with its table and its comparisons."""

    study: Study
    table: Rows
    paired: Paired
    experiment: Experiment | None = None

    def shows(self, figure: str) -> bool:
        """Return whether a figure is shown beside."""
        return self.experiment is None or self.experiment.shows(figure)

    @cached_property
    def rows(self) -> Rows:
        """The rows of the table, less those that lead to no end since their run diverged."""
        branches = [run for run in self.study.trained if run.branch_from]
        reached = {
            self.study.parent_of(run).name for run in branches if run.name not in self.diverged
        }
        # A parent that diverged stays where a branch of it left before and came to its end.
        left_out = self.diverged.keys() - reached
        return [row for row in self.table if row["run"] not in left_out]

    @cached_property
    def diverged(self) -> dict[str, str]:
        """The runs that no claim and no choice is about, by name, and how they diverged."""
        return diverged_runs(self.paired.directory, self.study)

    @cached_property
    def ends(self) -> list[RunSummary]:
        """The runs that are ends of training, in order, less those that diverged."""
        ends = summarize(self.study, self.rows)
        return [end for end in ends if end.run.name not in self.diverged]

    @property
    def annealed(self) -> list[RunSummary]:
        """The ends at which the learning rate decays, but for those of perturbed weights.

        An anneal with QAT, noise or SAM shows the intervention as well as the decay.
        """
        return [
            end for end in self.ends if end.anneals and _decays(end) and not is_perturbed(end.run)
        ]

    @property
    def groups(self) -> dict[str, list[RunSummary]]:
        """The ends that are the same but for their seed, by the label of their group."""
        return grouped(self.ends, lambda end: end.group)


def is_perturbed(run: AnyRun) -> bool:
    """Return whether updates of a run are at changed weights: QAT, noise or SAM."""
    return isinstance(run, RunConfig) and run.perturbation is not None


def _decays(end: RunSummary) -> bool:
    """Return whether the anneal of a run is a decay: it may end at the rate where it starts."""
    if not isinstance(end.run, RunConfig) or not end.run.schedule.anneal:
        return True  # a released run anneals where its rates say so
    before = learning_rate(end.run, end.run.schedule.anneal.start_step)
    return learning_rate(end.run, end.run.total_steps) <= DECAYED * before


@dataclass(frozen=True)
class Measure:
    """A figure at a spec, by which a claim is judged, with its estimates and numbers in words.

    Its estimates are less the figure at the spec `minus`, where one is given.
    """

    evidence: Evidence
    spec: str
    figure: Column
    minus: str = ""

    @property
    def column(self) -> str:
        """The column of the table."""
        return self.figure.of(self.spec)

    @property
    def title(self) -> str:
        """The name in words: 'KL divergence (GPTQ, 3 bits, groups of 32)'."""
        return f"{self.figure.title} ({spec_title(self.spec)})"

    def by(self, *, spec: str = "", figure: Column | None = None) -> "Measure":
        """Return another figure at this spec, or this figure at another spec."""
        return Measure(self.evidence, spec or self.spec, figure or self.figure)

    def estimate(self, replicates: Replicates) -> Estimate:
        """Return the mean over seeds of a weighted sum of the figure."""
        return self.evidence.paired.estimate(
            list(replicates.values()), self.spec, self.figure, self.minus
        )

    @property
    def sign(self) -> str:
        """The sign after a share; nats have theirs in a heading, or once in the line: `unit`."""
        return "%" if self.figure.is_share else ""

    @property
    def unit(self) -> str:
        """The unit that values in words have no sign of; empty for shares."""
        return "" if self.sign else self.figure.difference_unit

    def effect(self, estimate: Estimate) -> str:
        """Return an estimate with its interval, in `unit` or percent."""
        return self.figure.difference(estimate.value, *estimate.interval()) + self.sign

    def sources(self, estimate: Estimate) -> str:
        """Return the standard error by every source, and what the estimate does not hold."""
        scale = self.figure.difference_scale
        parts = [
            f"{name} {significant(scale * source.standard_error, 2)}{self.sign}"
            for name, source in estimate.sources.items()
        ]
        words = f"standard errors: {', '.join(parts)}"
        return words if estimate.holds_seeds else f"{words}; no seeds: of these trainings only"

    def end(self, end: RunSummary, *others: str) -> Row:
        """Return the row of the end of training; NotTested where a column is not measured."""
        return needed(f"the end of {end.label}", end.last, self.column, *others)

    def before(self, end: RunSummary) -> Row:
        """Return the row before the decay; NotTested where the figure is not measured."""
        return needed(f"{end.label} before the decay", end.first, self.column)


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, in our words.

    Attributes:
        name: unique.
        sentence: what is claimed, short enough for a line of a table.
        source: where the paper says so.
        needs: what a study must hold to test it.
        figure: name of the one that shows it.
        judge: gives a verdict for each quantity; the first is primary, the others are beside it.
        concerns: whether a study is about it; the claims of others do not list it.
    """

    name: str
    sentence: str
    source: str
    needs: str
    figure: str
    judge: Callable[[Evidence], list[Verdict]]
    concerns: Callable[[Study], bool]


def claim(
    name: str,
    sentence: str,
    *,
    source: str,
    needs: str,
    figure: str,
    concerns: Callable[[Study], bool] = lambda _: True,
) -> Callable[[Callable[[Evidence], list[Verdict]]], Claim]:
    """Make a claim of the function that judges it."""
    return lambda judge: Claim(name, sentence, source, needs, figure, judge, concerns)


def judged(title: str, judge: Callable[..., Verdict], *arguments: Any) -> Verdict:
    """Return what `judge` makes of its arguments under the name of the quantity."""
    try:
        return judge(*arguments)._replace(measure=title)
    except NotTested as reason:
        return Verdict("not tested", str(reason), measure=title)


def measures(
    evidence: Evidence, specs: Sequence[str], figures: Sequence[Column] = ERRORS
) -> list[Measure]:
    """Return every figure at each of these specs, those of the fewest bits first."""
    # Fewest bits first, since the first measure of a claim is its primary one.
    by_bits = sorted(specs, key=lambda spec: parse_spec(spec).bits)
    return [Measure(evidence, spec, figure) for spec in by_bits for figure in figures]


def by_measure(judge: Callable[[Measure], Verdict]) -> Callable[[Evidence], list[Verdict]]:
    """Judge each figure at each spec of all checkpoints: KL divergence at the fewest bits first."""
    return lambda evidence: [
        judged(measure.title, judge, measure)
        for measure in measures(evidence, evidence.study.quantization.specs)
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
    """Return the outcome of `count` comparisons, some of them significant in either direction.

    Example:
        >>> decided(3, 0, 3), decided(2, 1, 3), decided(0, 1, 3)
        ('supported', 'not decided', 'contradicted')
    """
    if agreeing == count:
        return "supported"
    return "contradicted" if opposing and not agreeing else "not decided"
