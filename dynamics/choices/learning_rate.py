"""The peak learning rate by its quantization error at equal loss, and by its quantized loss.

At equal loss, the error of each run is read off its own checkpoints (`mechanism.equal_loss`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from base.errors import UserError
from base.statistics import INTERVAL_LEVEL, holm
from dynamics.claims.data import alike
from dynamics.mechanism.equal_loss import (
    Crossing,
    crossing,
    interpolated,
    loss_column,
    measured_path,
    shared_losses,
)
from quant_eval.estimate import Estimate
from study.axes import amount_name
from study.claims.verdict import Evidence, Measure, NotTested
from study.measurements.kind import Column
from study.measurements.quantization import QUANTIZED_LOSS
from study.results.paired import Paired, Weighted
from study.results.summary import RunSummary, enumeration, left_out
from train.run.config import RunConfig


class Ranked(NamedTuple):
    """One of several choices, with its figure, its excess over the best, and p of no excess."""

    label: str
    estimate: Estimate
    excess: Estimate | None = None
    p_adjusted: float | None = None


def ranked(
    choices: Mapping[str, Sequence[Weighted]], paired: Paired, spec: str, figure: Column
) -> list[Ranked]:
    """Return the choices by rising figure, each with its paired excess over the lowest.

    A choice is a weighted sum of rows for every seed, the same seeds in the same order for all.
    Holm's correction is over every pair, for the data choose which is the lowest.
    """
    estimates = {
        label: paired.estimate(replicates, spec, figure) for label, replicates in choices.items()
    }
    # Rising, so each pair is (lower, higher) and no excess over the best is negative.
    order = sorted(choices, key=lambda label: estimates[label].value)
    pairs = {
        (low, high): paired.estimate(_differences(choices[low], choices[high]), spec, figure)
        for low, high in combinations(order, 2)
    }
    adjusted = dict(
        zip(pairs, holm([difference.p_value() for difference in pairs.values()]), strict=True)
    )
    best, *others = order
    return [
        Ranked(best, estimates[best]),
        *(
            Ranked(label, estimates[label], pairs[best, label], adjusted[best, label])
            for label in others
        ),
    ]


def _differences(low: Sequence[Weighted], high: Sequence[Weighted]) -> list[Weighted]:
    """Return high - low for every seed."""
    return [
        [*second, *((row, -weight) for row, weight in first)]
        for first, second in zip(low, high, strict=True)
    ]


Sweep = dict[float, list[RunSummary]]  # by peak learning rate an end for every seed


class Answer(NamedTuple):
    """Peak learning rates ranked by one quantity.

    `where` is equal loss or equal tokens, in words. The lowest comes first; without a ranking
    there is a reason.
    """

    measure: Measure
    where: str
    ranking: list[Ranked]
    reason: str = ""


def sweeps(ends: Sequence[RunSummary]) -> list[Sweep]:
    """Return groups of ends of training that differ in peak learning rate and seed alone.

    Of each only the seeds that every peak has, in one order.
    """
    groups = []
    for group in alike(ends, ("optimizer.peak_lr", "seed")):
        by_peak: dict[float, dict[int, RunSummary]] = {}
        for end in group:
            assert isinstance(end.run, RunConfig)
            by_peak.setdefault(end.run.optimizer.peak_lr, {})[end.run.seed] = end
        # Differences are paired seed by seed, which takes the same seeds at every peak.
        seeds = sorted(set.intersection(*(set(of_peak) for of_peak in by_peak.values())))
        if len(by_peak) > 1 and seeds:
            groups.append(
                {peak: [by_peak[peak][seed] for seed in seeds] for peak in sorted(by_peak)}
            )
    return groups


def at_equal_loss(measure: Measure, sweep: Sweep, loss: float | None = None) -> Answer:
    """Rank the peaks by the figure at a full-precision loss; by default the lowest that all reach.

    Raises:
        UserError: `loss` is not one that the runs share.
        NotTested: they share none, or a run has fewer than two measured checkpoints or an error
            there that is not positive.
    """
    paths = {peak: [measured_path(measure, end) for end in ends] for peak, ends in sweep.items()}
    low, high = shared_losses(measure, [path for of_peak in paths.values() for path in of_peak])
    if loss is not None and not low <= loss <= high:
        raise UserError(
            f"--loss {loss:g} is outside {low:.4f} to {high:.4f} nats per token, the losses that"
            " all compared runs have passed; give one within"
        )
    # The lowest shared loss is the latest point that every run has passed.
    at = low if loss is None else loss

    # of each peak the figure there, seed by seed
    choices = {}
    for peak, of_peak in paths.items():
        crossings = [crossing(path, loss_column(measure), at) for path in of_peak]
        choices[_label(peak, crossings)] = [
            interpolated(each, measure.column) for each in crossings
        ]

    where = f"at a loss of {at:.4f} nats per token"
    where += ", the lowest that all reach" if loss is None else ""
    return Answer(
        measure, where, ranked(choices, measure.evidence.paired, measure.spec, measure.figure)
    )


def at_equal_tokens(measure: Measure, sweep: Sweep) -> Answer:
    """Rank the peaks by the quantized loss at the end of training, which has equal tokens.

    Raises:
        NotTested: an end is not measured.
    """
    by_loss = measure.by(figure=QUANTIZED_LOSS)
    ends = {peak: [by_loss.end(end) for end in of_peak] for peak, of_peak in sweep.items()}
    # Peaks are compared at one budget, so the first end tells it.
    tokens = next(iter(ends.values()))[0]["tokens"]
    choices: Mapping[str, Sequence[Weighted]] = {
        f"{peak:g}": [[(row, 1.0)] for row in of_peak] for peak, of_peak in ends.items()
    }
    where = f"at the end of {tokens:,} tokens"
    return Answer(
        by_loss, where, ranked(choices, measure.evidence.paired, measure.spec, QUANTIZED_LOSS)
    )


def _label(peak: float, crossings: Sequence[Crossing]) -> str:
    """Return '0.01 (anneal phase, 1.2M tokens)', the place of the first seed."""
    first, second, share = crossings[0]
    tokens = (1 - share) * first["tokens"] + share * second["tokens"]
    return f"{peak:g} ({second['phase']} phase, {amount_name(tokens).upper()} tokens)"


def answers(evidence: Evidence, loss: float | None = None) -> list[Answer]:
    """Return every ranking: at equal loss by each figure at each spec, then at equal tokens.

    Raises:
        UserError: as `at_equal_loss`, or no two runs differ in their peak learning rate alone.
    """
    groups, specs = sweeps(evidence.ends), evidence.study.quantization.specs
    if not groups:
        study = evidence.study
        others = [axis.name for axis in study.axes if axis.key != "peak_lr"]
        way = (
            f"its report begins with the effect of {enumeration(others)}, see also"
            f" 'python -m study report {study.name} --claims'"
        )
        raise UserError(
            f"choose ranks peak learning rates, and no two runs of {study.name} differ in that and"
            f" their seed alone; {way if others else 'take a study that sweeps it'}"
        )
    matched = [
        _answer(sweep, Measure(evidence, spec, figure), at_equal_loss, loss)
        for sweep in groups
        for spec in specs
        for figure in evidence.study.quantization.measures
    ]
    budgets = [
        _answer(sweep, Measure(evidence, spec, QUANTIZED_LOSS), at_equal_tokens)
        for sweep in groups
        for spec in specs
    ]
    return [*matched, *budgets]


def _answer(
    sweep: Sweep, measure: Measure, rank: Callable[..., Answer], *arguments: float | None
) -> Answer:
    """Return a ranking, or the reason why there is none, with what else the sweep's runs share."""
    study = measure.evidence.study
    run = next(iter(sweep.values()))[0].run
    # What the runs of one sweep share tells it from the other sweeps of the study.
    others = [axis for axis in study.axes if axis.key != "peak_lr"]
    shared = [f"{axis.name} {axis.text_of(run.name)}" for axis in others]
    used = {end.run.name for ends in sweep.values() for end in ends}
    try:
        answer = rank(measure, sweep, *arguments)
    except NotTested as reason:
        answer = Answer(measure, "not ranked", [], str(reason))
    said = [*shared, answer.where, left_out(measure.evidence.ends, used)]
    return answer._replace(where=", ".join(filter(None, said)))


NOTE = (
    f"Intervals are {INTERVAL_LEVEL:.0%}, over {{sources}}; p is of no difference to the first,"
    " paired, with Holm's correction over all pairs of a list. At equal loss log error is linear in"
    " the loss between two checkpoints of a run, and the losses are taken as known. A run that"
    " passes the loss before its anneal is compared as it is there."
)


def headline(rankings: Sequence[Answer]) -> str:
    """Return the first ranking in a sentence; empty without any."""
    answer = next((each for each in rankings if each.ranking), None)
    if answer is None:
        return ""
    measure, (best, second, *_) = answer.measure, answer.ranking
    return (
        f"{_titled(measure)}, {answer.where}: the peak learning rate {best.label} has the lowest,"
        f" {_value(measure, best.estimate.value)}; {second.label} has"
        f" {_difference(measure, second)}."
    )


def learning_rate_line(evidence: Evidence) -> str:
    """Return the first ranking of peak learning rates; empty for a study that sweeps none."""
    return headline(answers(evidence)) if sweeps(evidence.ends) else ""


def answers_text(rankings: Sequence[Answer]) -> str:
    """Return every ranking as lines, and a note on intervals and tests."""
    lines = [headline(rankings)]
    for answer in rankings:
        title = f"{_titled(answer.measure)}, {answer.where}: {answer.reason}".rstrip()
        lines += ["", title, *_ranking(answer.measure, answer.ranking)]
    sources = dict.fromkeys(
        name for answer in rankings for ranked in answer.ranking for name in ranked.estimate.sources
    )
    return "\n".join([*lines, "", NOTE.format(sources=" and ".join(sources) or "nothing")])


def _titled(measure: Measure) -> str:
    """Return the name of a measure with the unit of the values below it."""
    return f"{measure.title} in nats per token" if measure.unit else measure.title


def _ranking(measure: Measure, ranking: Sequence[Ranked]) -> Iterator[str]:
    width = max((len(ranked.label) for ranked in ranking), default=0)
    for number, ranked in enumerate(ranking, 1):
        low, high = (_value(measure, end) for end in ranked.estimate.interval(INTERVAL_LEVEL))
        value = f"{_value(measure, ranked.estimate.value)} [{low}, {high}]"
        yield f"  {number}. {ranked.label:{width}}  {value}" + (
            f"  {_difference(measure, ranked)}" if ranked.excess else ""
        )


def _value(measure: Measure, value: float) -> str:
    if measure.figure == QUANTIZED_LOSS:
        return f"{value:.4f}"
    return f"{100 * value:.3g}%" if measure.figure.is_share else f"{value:.3g}"


def _difference(measure: Measure, ranked: Ranked) -> str:
    assert ranked.excess is not None
    return f"{measure.effect(ranked.excess)}, Holm p {ranked.p_adjusted:.2g}"
