"""The arms of a study ranked: by quantization error at equal loss, and by quantized loss.

Arms differ in their peak learning rate alone, or in optimizer, anneal and perturbation. The
quantized loss is compared at equal tokens, and at equal training FLOPs where arms differ in those.

At equal loss, the error of each run is read off its own checkpoints (`mechanism.equal_loss`), and
so is the quantized loss at equal FLOPs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from base.aligned import aligned, wrapped
from base.errors import UserError
from base.grouping import grouped
from base.quantities import significant
from base.statistics import INTERVAL_LEVEL, holm
from dynamics.claims.data import alike
from dynamics.mechanism.equal_loss import (
    Crossing,
    crossing,
    loss_column,
    measured_path,
    read_off,
    shared_losses,
)
from quant_eval.estimate import Estimate
from study.axes import amount_name
from study.claims.finding import times
from study.claims.verdict import ALPHA, Evidence, Measure, NotTested
from study.measurements.kind import Column
from study.measurements.quantization import QUANTIZED_LOSS
from study.results.paired import Paired, Weighted
from study.results.summary import RunSummary, enumeration, left_out
from study.results.table import Row
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
    return [[*second, *times(-1, first)] for first, second in zip(low, high, strict=True)]


class Arms(NamedTuple):
    """The ends of training that are ranked: by label those of each arm, one for every seed.

    Attributes:
        title: what one of them is, in words.
        ends: of each the seeds that all have, in one order.
    """

    title: str
    ends: Mapping[str, Sequence[RunSummary]]


class Answer(NamedTuple):
    """Arms ranked by one quantity.

    `where` is equal loss, tokens or FLOPs, in words, and `shared` what the runs have in common that
    others of the study have not. The lowest comes first; without a ranking there is a reason.
    """

    measure: Measure
    where: str
    ranking: list[Ranked]
    reason: str = ""
    title: str = ""
    shared: str = ""


PEAK, ARM = "the peak learning rate", "the arm"
# What arms may differ in; tokens, data, batch and model are equal.
ARM_SETTINGS = ("optimizer", "schedule.anneal", "perturbation", "averages")
FLOPS = "training_flops"
OTHERS_SHOWN = 2  # in a sentence on the lowest
SAME_COST = 1e-6  # relative; arms whose FLOPs differ by less cost the same


def sweeps(ends: Sequence[RunSummary]) -> list[Arms]:
    """Return groups of ends of training that differ in peak learning rate and seed alone."""
    groups = []
    for group in alike(ends, ("optimizer.peak_lr", "seed")):
        by_peak = sorted(group, key=_peak)
        arms = _with_seeds(PEAK, by_peak, lambda end: f"{_peak(end):g}")
        groups += [arms] if arms else []
    return groups


def _peak(end: RunSummary) -> float:
    assert isinstance(end.run, RunConfig)
    return end.run.optimizer.peak_lr


def interventions(ends: Sequence[RunSummary]) -> list[Arms]:
    """Return groups that differ in `ARM_SETTINGS` and seed, and not in the peak alone."""
    compared = {_runs(arms) for arms in sweeps(ends)}
    groups = []
    for group in alike(ends, (*ARM_SETTINGS, "seed")):
        arms = _with_seeds(ARM, group, lambda end: end.group)
        groups += [arms] if arms and _runs(arms) not in compared else []
    return groups


def _runs(arms: Arms) -> frozenset[str]:
    return frozenset(end.run.name for ends in arms.ends.values() for end in ends)


def _with_seeds(
    title: str, group: Sequence[RunSummary], label: Callable[[RunSummary], str]
) -> Arms | None:
    """Return the arms of a group with the seeds that all have; None for fewer than two arms."""
    by_label: dict[str, dict[int | None, RunSummary]] = {}
    for end in group:
        by_label.setdefault(label(end), {})[end.seed] = end
    # Differences are paired seed by seed, which takes the same seeds for every arm.
    seeds = sorted(set.intersection(*(set(of_arm) for of_arm in by_label.values())), key=str)
    if len(by_label) < 2 or not seeds:
        return None
    return Arms(title, {name: [ends[seed] for seed in seeds] for name, ends in by_label.items()})


def at_equal_loss(measure: Measure, arms: Arms, loss: float | None = None) -> Answer:
    """Rank the arms by the figure at a full-precision loss; by default the lowest that all reach.

    Raises:
        UserError: `loss` is not one that the runs share.
        NotTested: they share none, or a run has fewer than two measured checkpoints or an error
            there that is not positive.
    """
    column = loss_column(measure)
    paths = _paths(measure, arms, column)
    low, high = shared_losses(measure, [path for of_arm in paths.values() for path in of_arm])
    if loss is not None and not low <= loss <= high:
        raise UserError(
            f"--loss {loss:g} is outside {low:.4f} to {high:.4f} nats per token, the losses that"
            " all compared runs have passed; give one within"
        )
    # The lowest shared loss is the latest point that every run has passed.
    at = low if loss is None else loss

    where = f"at a loss of {at:.4f} nats per token"
    where += ", the lowest that all reach" if loss is None else ""
    return Answer(measure, where, _ranked_at(measure, paths, column, at))


def _paths(measure: Measure, arms: Arms, column: str) -> dict[str, list[list[Row]]]:
    """Return the measured checkpoints of every arm, seed by seed, that have a column, too."""
    return {
        label: [measured_path(measure, end.run, column) for end in ends]
        for label, ends in arms.ends.items()
    }


def _ranked_at(
    measure: Measure, paths: Mapping[str, Sequence[Sequence[Row]]], column: str, at: float
) -> list[Ranked]:
    """Rank by the figure where a column passes a value, read off the checkpoints of each run."""
    choices = {}
    for label, of_arm in paths.items():
        crossings = [crossing(path, column, at) for path in of_arm]
        choices[_label(label, crossings)] = [read_off(measure, each) for each in crossings]
    return ranked(choices, measure.evidence.paired, measure.spec, measure.figure)


def at_equal_tokens(measure: Measure, arms: Arms) -> Answer:
    """Rank the arms by the quantized loss at the end of training, which has equal tokens.

    Arms that cost more than the cheapest say so, in training FLOPs.

    Raises:
        NotTested: an end is not measured.
    """
    by_loss = measure.by(figure=QUANTIZED_LOSS)
    ends = {label: [by_loss.end(end) for end in of_arm] for label, of_arm in arms.ends.items()}
    # Arms are compared at one budget, so the first end tells it.
    tokens = next(iter(ends.values()))[0]["tokens"]
    costs = {label: of_arm[0][FLOPS] for label, of_arm in ends.items()}
    choices: Mapping[str, Sequence[Weighted]] = {
        f"{label}{_dearer(costs, label)}": [[(row, 1.0)] for row in of_arm]
        for label, of_arm in ends.items()
    }
    where = f"at the end of {tokens:,} tokens"
    return Answer(
        by_loss, where, ranked(choices, measure.evidence.paired, measure.spec, QUANTIZED_LOSS)
    )


def _dearer(costs: Mapping[str, float | None], label: str) -> str:
    """Return ' (1.25 x the FLOPs)', against the cheapest; empty of one that costs as little."""
    known = {arm: cost for arm, cost in costs.items() if cost is not None}
    if len(known) < len(costs) or known[label] <= min(known.values()) * (1 + SAME_COST):
        return ""
    return f" ({known[label] / min(known.values()):.3g} x the FLOPs)"


def at_equal_cost(measure: Measure, arms: Arms) -> Answer:
    """Rank the arms by the quantized loss at the most training FLOPs that all of them reach.

    Raises:
        NotTested: they all end with these, or a run has fewer than two measured checkpoints, or
            none before and after them.
    """
    by_loss = measure.by(figure=QUANTIZED_LOSS)
    paths = _paths(by_loss, arms, FLOPS)
    ends = [path[-1][FLOPS] for of_arm in paths.values() for path in of_arm]
    at = min(ends)
    if max(ends) <= at * (1 + SAME_COST):
        raise NotTested(f"all cost {at:.4g} training FLOPs, see the list at equal tokens")
    where = f"at {at:.4g} training FLOPs, the most that all reach"
    return Answer(by_loss, where, _ranked_at(by_loss, paths, FLOPS, at))


def _label(arm: str, crossings: Sequence[Crossing]) -> str:
    """Return '0.01 (anneal phase, 1.2M tokens)', the place of the first seed."""
    first, second, share = crossings[0]
    tokens = (1 - share) * first["tokens"] + share * second["tokens"]
    return f"{arm} ({second['phase']} phase, {amount_name(tokens).upper()} tokens)"


def answers(evidence: Evidence, loss: float | None = None) -> list[Answer]:
    """Return every ranking: at equal loss by each figure at each spec, then at equal tokens.

    And last at equal FLOPs, of arms that differ in them.

    Raises:
        UserError: as `at_equal_loss`, or there are no arms.
    """
    groups, specs = groups_of(evidence), evidence.study.quantization.specs
    if not groups:
        study = evidence.study
        others = [axis.name for axis in study.axes if axis.key != "peak_lr"]
        way = (
            f"its report begins with the effect of {enumeration(others)}, see also"
            f" 'python -m study report {study.name} --claims'"
        )
        raise UserError(
            "choose ranks peak learning rates, or optimizers, anneals and perturbations, and no two"
            f" runs of {study.name} differ in these and their seed alone;"
            f" {way if others else 'take a study that sweeps one'}"
        )
    matched = [
        _answer(arms, Measure(evidence, spec, figure), at_equal_loss, loss)
        for arms in groups
        for spec in specs
        for figure in evidence.study.quantization.measures
    ]
    losses = [
        _answer(arms, Measure(evidence, spec, QUANTIZED_LOSS), rank)
        for rank in (at_equal_tokens, at_equal_cost)
        for arms in groups
        # peaks cost the same
        if rank is at_equal_tokens or arms.title == ARM
        for spec in specs
    ]
    return [*matched, *losses]


def groups_of(evidence: Evidence) -> list[Arms]:
    """Return all that is ranked: sweeps of the peak first."""
    return [*sweeps(evidence.ends), *interventions(evidence.ends)]


def _answer(
    arms: Arms, measure: Measure, rank: Callable[..., Answer], *arguments: float | None
) -> Answer:
    """Return a ranking, or the reason why there is none, with what else the arms share."""
    study, used = measure.evidence.study, _runs(arms)
    # What its runs share tells a group from the others of the study.
    texts = {axis.name: {axis.text_of(run) for run in used} for axis in study.axes}
    shared = [f"{name} {values.pop()}" for name, values in texts.items() if len(values) == 1]
    try:
        answer = rank(measure, arms, *arguments)
    except NotTested as reason:
        answer = Answer(measure, "not ranked", [], str(reason))
    said = [*shared, answer.where, left_out(measure.evidence.ends, used)]
    where = ", ".join(filter(None, said))
    return answer._replace(where=where, title=arms.title, shared=", ".join(shared))


NOTE = (
    f"Intervals are {INTERVAL_LEVEL:.0%}, over {{sources}}; p is of no difference to the first,"
    " paired, with Holm's correction over all pairs of a list. At equal loss log error is linear in"
    " the loss between two checkpoints of a run (the loss increase itself, which may be negative),"
    " and the losses are taken as known; at equal FLOPs likewise. A run that passes the loss or the"
    " FLOPs before the end of its anneal is compared as it is there: one planned for these FLOPs"
    " would have ended its anneal."
)
GROUPS = 4  # of arms, whose choices are on the first screen


def choice_of(answer: Answer) -> str:
    """Return what a ranking chooses, in a sentence: the lowest, if the others differ from it.

    'choose the peak learning rate 0.012 by the quantized loss (GPTQ, 3 bits) at the end of ...'
    """
    measure, (best, *others) = answer.measure, answer.ranking
    alike = [ranked.label for ranked in others if (ranked.p_adjusted or 0) > ALPHA]
    chosen = f"choose {answer.title} {best.label}"
    if alike:
        among = enumeration([best.label, *alike])
        chosen = f"choose {answer.title} among {among}"
    if len(alike) == len(others):
        chosen = f"no choice of {answer.title}"
    is_loss = measure.figure == QUANTIZED_LOSS
    unit = "" if measure.sign else " nats/token" if is_loss else f" x {measure.unit}"
    power = " x 10^-3" if is_loss else ""  # of the differences
    more = "; ".join(
        f"{ranked.label} has {measure.effect(excess)}{power} more (Holm p {ranked.p_adjusted:.2g})"
        for ranked in others[:OTHERS_SHOWN]
        if (excess := ranked.excess)
    )
    least = f"{best.label} has {_value(measure, best.estimate.value)}{unit}"
    doubt = " (no significant difference)" if alike else ""
    return f"{chosen} by the {measure.title}, {answer.where}: {least}; {more}{doubt}"


def first_answers(rankings: Sequence[Answer]) -> list[Answer]:
    """Return the answers of one group of arms: the best quantized model, and the least error.

    The quantized loss at equal tokens says which model to take, the error at equal full-precision
    loss which weights quantize best; each by the first spec.
    """
    by_loss = [answer for answer in rankings if answer.measure.figure == QUANTIZED_LOSS]
    by_error = [answer for answer in rankings if answer.measure.figure != QUANTIZED_LOSS]
    return [answers[0] for answers in (by_loss, by_error) if answers]


def choice_line(evidence: Evidence) -> str:
    """Return the choices of the first group of arms in sentences; empty without arms."""
    if not groups_of(evidence):
        return ""
    first, *_ = grouped(answers(evidence), _group).values()
    return " ".join(f"{_capital(words)}." for words in _choices(first))


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _choices(rankings: Sequence[Answer]) -> list[str]:
    return [choice_of(answer) for answer in first_answers(rankings) if answer.ranking]


def _group(answer: Answer) -> tuple[str, str]:
    return answer.title, answer.shared


def answers_lines(rankings: Sequence[Answer], *, whole: bool = False) -> Iterator[str]:
    """Yield the choices, and the list that the first rests on; `whole` with every ranking."""
    groups = list(grouped(rankings, _group).values())
    for group in groups if whole else groups[:GROUPS]:
        words = _choices(group) or [
            f"no choice of {group[0].title}: {first_answers(group)[0].reason}"
        ]
        for sentence in words:
            yield from wrapped(sentence)
    if len(groups) > GROUPS and not whole:
        yield f"and {len(groups) - GROUPS} more groups of runs"

    listed = rankings if whole else [each for each in first_answers(groups[0]) if each.ranking][:1]
    for answer in listed:
        yield ""
        yield from wrapped(f"{_titled(answer.measure)}, {answer.where}: {answer.reason}".rstrip())
        yield from _ranking(answer.measure, answer.ranking)
    yield ""
    if not whole:
        yield "--all adds the rankings by every error and loss, at equal loss, tokens and FLOPs"
        return
    sources = dict.fromkeys(
        name for answer in rankings for ranked in answer.ranking for name in ranked.estimate.sources
    )
    yield from wrapped(NOTE.format(sources=enumeration([*sources]) or "nothing"))


def _titled(measure: Measure) -> str:
    """Return the name of a measure with the unit of the values after it."""
    if measure.figure == QUANTIZED_LOSS:
        return f"{measure.title} in nats/token, differences in {measure.unit}"
    return f"{measure.title} in {measure.unit}" if measure.unit else measure.title


def _ranking(measure: Measure, ranking: Sequence[Ranked]) -> Iterator[str]:
    rows = [
        (
            f"  {number}.",
            ranked.label,
            _bounded(measure, ranked.estimate),
            _difference(measure, ranked) if ranked.excess else "",
        )
        for number, ranked in enumerate(ranking, 1)
    ]
    yield from aligned(rows, right={0})


def _bounded(measure: Measure, estimate: Estimate) -> str:
    """Return a value with its interval; a loss in nats, in which losses are known."""
    if measure.figure != QUANTIZED_LOSS:
        return measure.effect(estimate)
    low, high = (_value(measure, end) for end in estimate.interval(INTERVAL_LEVEL))
    return f"{_value(measure, estimate.value)} [{low}, {high}]"


def _value(measure: Measure, value: float) -> str:
    if measure.figure == QUANTIZED_LOSS:
        return f"{value:.4f}"
    return f"{significant(measure.figure.difference_scale * value)}{measure.sign}"


def _difference(measure: Measure, ranked: Ranked) -> str:
    assert ranked.excess is not None
    return f"{measure.effect(ranked.excess)} more, Holm p {ranked.p_adjusted:.2g}"
