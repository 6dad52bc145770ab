"""Claims on the amount of data: it raises the error under cosine, and not by itself.

The competing claim is that tokens alone raise the error, whatever the learning rate does: Kumar et
al., arXiv 2411.04330, "Scaling Laws for Precision", where the loss that quantization adds to N
parameters trained on D tokens is C D^g / N^h exp(-bits / k). Within a run that is a power law in D.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, stdev

import numpy as np

from base.grouping import grouped
from base.quantities import with_interval
from dynamics.claims.schedule import (
    MARGIN,
    annealed,
    doublings,
    effect_of_anneal,
    growth_over,
    reach,
    slope_over_tokens,
    unit_of,
)
from quant_eval.estimate import ErrorSource, Estimate
from study.claims.finding import all_directed, conclude_within, times
from study.claims.verdict import (
    ALPHA,
    Measure,
    NotTested,
    Outcome,
    Replicates,
    Verdict,
    by_measure,
    claim,
)
from study.results.paired import Weighted
from study.results.summary import DECAYED, RunSummary, at_high_rate, enumeration, lineage
from study.results.table import Row, trained
from train.run.config import RunConfig
from train.run.schedules import learning_rate

Chosen = list[RunSummary]


def alike(ends: Iterable[RunSummary], but: Iterable[str]) -> list[Chosen]:
    """Return groups of runs that are the same but for these keys of run.json, dotted.

    Names, places of checkpoints and what is not part of a run's identity may differ too.
    """
    ignored = {*but, *RunConfig.NOT_IDENTITY, "save_steps", "evaluate_every_steps", "branch_from"}

    def identity(end: RunSummary) -> str:
        content = end.run.model_dump(mode="json")
        for key in ignored:
            # A section that is None, such as an absent anneal, has nothing to ignore.
            *parents, last = key.split(".")
            section = content
            for parent in parents:
                section = section.get(parent) or {}
            section.pop(last, None)
        return json.dumps(content, sort_keys=True)

    groups = grouped((end for end in ends if isinstance(end.run, RunConfig)), identity)
    return [group for group in groups.values() if len(group) > 1]


def replicated(
    ends: Iterable[RunSummary], but: Iterable[str]
) -> dict[str, dict[int | None, Chosen]]:
    """Return groups of runs that are the same but for these keys, by seed.

    Each is under the labels of its runs, those of the first seed.
    """
    by_label: dict[str, dict[int | None, Chosen]] = {}
    for group in alike(ends, [*but, "seed"]):
        by_seed = grouped(group, lambda end: end.seed)
        sets = {
            seed: ends for seed, ends in by_seed.items() if len({end.group for end in ends}) > 1
        }
        if sets:
            first = next(iter(sets.values()))
            by_label[enumeration([end.group for end in first])] = sets
    return by_label


LENGTH = ("total_steps", "schedule.anneal.start_step", "schedule.phase.horizon_tokens")


def _is_cooldown(run: RunConfig) -> bool:
    """Return whether the schedule is WSD: a constant rate, then an anneal."""
    return run.schedule.phase.kind == "constant" and run.schedule.anneal is not None


def _is_cosine(run: RunConfig) -> bool:
    """Return whether the schedule is a cosine that is mostly decayed at the end."""
    decayed = learning_rate(run, run.total_steps) <= DECAYED * run.optimizer.peak_lr
    return run.schedule.phase.kind == "cosine" and run.schedule.anneal is None and decayed


KINDS = (_is_cosine, _is_cooldown)


def _of_schedule(ends: Iterable[RunSummary], fits: Callable[[RunConfig], bool]) -> list[RunSummary]:
    return [end for end in ends if isinstance(end.run, RunConfig) and fits(end.run)]


@claim(
    "budgets",
    "More data alone does not raise the error",
    figure="ends",
    source="abstract, section 5, figure 5",
    needs="runs that hold the rate and anneal, and differ in their length alone, with controls",
)
@by_measure
def budgets(measure: Measure) -> Verdict:
    """Compare the change over ends of cooldowns that differ in length alone with a margin.

    Not raising is one-sided: an error that falls with the tokens is in agreement.
    """
    groups = _of_several_lengths(measure)
    if not groups:
        raise NotTested("no two runs hold the rate, then anneal, and differ in their length alone")
    # `annealed` leaves out the runs without a control, which the margin needs.
    tested = {end.run.name for end in annealed(measure)}
    swept = [ends for sets in groups.values() for ends in sets.values()]
    if not all(end.run.name in tested for ends in swept for end in ends):
        raise NotTested("an annealed run has no control at equal tokens")

    changes, margins, spans = dict[str, Replicates](), dict[str, Replicates](), set[float]()
    for label, sets in groups.items():
        rows = {seed: [measure.end(end) for end in ends] for seed, ends in sets.items()}
        changes[label] = {seed: growth_over(of_seed) for seed, of_seed in rows.items()}
        margins[label] = {seed: _share_of_anneal(measure, ends) for seed, ends in sets.items()}
        spans |= set(map(doublings, rows.values()))

    beside = (
        f"slope x span over {reach(spans)} doublings of the budget; the margin is {MARGIN:g} of the"
        " mean change by the anneal; one-sided"
    )
    return conclude_within(measure, changes, margins, two_sided=False, beside=beside)


def _of_several_lengths(measure: Measure) -> dict[str, dict[int | None, Chosen]]:
    """Return the groups of cooldowns by seed that end after different numbers of steps."""
    groups = replicated(_of_schedule(measure.evidence.ends, _is_cooldown), LENGTH)
    several = {
        # Anneals that start at different steps may end at one: these are of one length.
        label: {
            seed: ends
            for seed, ends in sets.items()
            if len({end.run.total_steps for end in ends}) > 1
        }
        for label, sets in groups.items()
    }
    return {label: sets for label, sets in several.items() if sets}


def _share_of_anneal(measure: Measure, ends: Sequence[RunSummary]) -> Weighted:
    """Return the share MARGIN of what the anneals of some runs do on average."""
    share = MARGIN / len(ends)
    return [part for end in ends for part in times(share, effect_of_anneal(measure, end))]


@claim(
    "schedules",
    "The error grows faster under cosine",
    figure="ends",
    source="figure 5",
    needs="two budgets under each of the two schedules, cosine and a constant rate with cooldown",
)
@by_measure
def schedules(measure: Measure) -> Verdict:
    """Compare the change over the budgets under cosine with that under cooldowns."""
    chosen = [end for fits in KINDS for end in _of_schedule(measure.evidence.ends, fits)]
    parts = dict[str, Replicates]()
    for label, sets in replicated(chosen, ("total_steps", "schedule")).items():
        contrasts: Replicates = {}
        for seed, ends in sets.items():
            kinds = [_of_schedule(ends, fits) for fits in KINDS]
            # A slope takes two budgets under both schedules.
            if min(len({end.run.total_steps for end in kind}) for kind in kinds) < 2:
                continue
            rows = [[measure.end(end) for end in kind] for kind in kinds]
            span = min(map(doublings, rows))  # both slopes over the same doublings
            cosine, cooldown = map(slope_over_tokens, rows)
            contrasts[seed] = times(span, [*cosine, *times(-1, cooldown)])
        if contrasts:
            parts[label] = contrasts
    if not parts:
        raise NotTested(
            "no two budgets under each of cosine and constant rate with cooldown, all else the same"
        )
    beside = "slope x span over the budgets under cosine minus that under cooldowns"
    return all_directed(measure, parts, "higher", beside=beside)


LEAST_CHECKPOINTS = 3  # a power law through two always fits them


@claim(
    "tokens",
    "Tokens explain the error, not the decay",
    figure="kl_divergence",
    source="arXiv 2411.04330, scaling law of quantization after training",
    needs="two runs or more that anneal, other than by seed, with their controls and checkpoints"
    " before the anneal, or two released models",
)
@by_measure
def tokens(measure: Measure) -> Verdict:
    """Score both at the same annealed ends, by |log(predicted / measured)|, and compare by group.

    The power law is fitted to the run's weights at its high rate and those of its control, the
    factor to the runs of other groups. The unit of the test is the group of runs that differ in
    their seed alone, or the released model. Without a control, of released models, the decay is
    what comes after the last weights at the high rate.
    """
    # Both predictions are scored on the same ends.
    ends = [end for end in measure.evidence.annealed if _is_complete(measure, end)]
    groups = sorted(set(map(unit_of, ends)))
    if len(groups) < 2:
        raise NotTested(
            "annealed runs with a measured control, or released models, but for seeds:"
            f" {len(groups)}"
        )

    # of each annealed end the error of both predictions, averaged over the seeds of a group
    errors = {
        group: [
            (_by_tokens(measure, end), _by_decay(measure, end, ends))
            for end in ends
            if unit_of(end) == group
        ]
        for group in groups
    }
    by_tokens = [fmean(first for first, _ in errors[group]) for group in groups]
    by_decay = [fmean(second for _, second in errors[group]) for group in groups]

    # their paired difference over groups: below 0 the tokens predict better
    estimate = _over_groups(
        [first - second for first, second in zip(by_tokens, by_decay, strict=True)]
    )
    p_value = estimate.p_value()
    effect = f"{with_interval(estimate.value, *estimate.interval())} in log"
    statistic = (
        f"mean |log(predicted / measured)| of {len(ends)} annealed ends: {fmean(by_tokens):.3g} by"
        f" the power law, {fmean(by_decay):.3g} by the decay; difference {effect} over"
        f" {len(groups)} groups of runs (paired, Student's t, p {p_value:.2g})"
    )
    outcome: Outcome = "supported" if estimate.value < 0 else "contradicted"
    return Verdict(
        "not decided" if p_value > ALPHA else outcome,
        statistic,
        effect,
        p_value,
        f"{sum(first < second for first, second in zip(by_tokens, by_decay, strict=True))} of"
        f" {len(groups)} by tokens",
        holds_seeds=True,
    )


def _is_complete(measure: Measure, end: RunSummary) -> bool:
    """Return whether both predictions can be made and scored."""
    needed = (end.last, _reference(end))
    has_errors = all(row is not None and _error(measure, row) for row in needed)
    return has_errors and len(_at_high_rate(measure, end)) >= LEAST_CHECKPOINTS


def _error(measure: Measure, row: Row) -> float | None:
    """Return the figure of a row; None where it has no logarithm."""
    value = row.get(measure.column)
    return value if value and value > 0 else None


def _reference(end: RunSummary) -> Row | None:
    """Return what the decay is compared with: the control, or of a released model its start."""
    return end.control if isinstance(end.run, RunConfig) else end.first


def _at_high_rate(measure: Measure, end: RunSummary) -> list[tuple[float, float]]:
    """Return tokens and error of a run before its anneal and of its control."""
    study, rows = measure.evidence.study, measure.evidence.rows
    control = study.control_of(end.run)
    path = [*lineage(study, rows, end.run), *(lineage(study, rows, control) if control else ())]
    high = (
        [row for row in trained(path) if row["phase"] == "stable"]
        if isinstance(end.run, RunConfig)
        else [row for row in at_high_rate(path) if row["tokens"]]
    )
    # By tokens: a run and its control share rows up to the branch, each counts once.
    stable = {row["tokens"]: row for row in high}
    assert end.last is not None
    return [
        (tokens, error)
        for tokens, row in sorted(stable.items())
        if tokens <= end.last["tokens"] and (error := _error(measure, row))
    ]


def _by_tokens(measure: Measure, end: RunSummary) -> float:
    """Return how far the power law is off at the end of a run."""
    assert end.last is not None
    log_tokens, log_errors = np.log(np.array(_at_high_rate(measure, end))).T
    # A power law in D is a line in the logarithms.
    slope, intercept = np.polyfit(log_tokens, log_errors, 1)
    predicted = intercept + slope * math.log(end.last["tokens"])
    return abs(float(predicted) - _log_error(measure, end.last))


def _by_decay(measure: Measure, end: RunSummary, ends: Sequence[RunSummary]) -> float:
    """Return how far the reference's error times the mean factor of the other groups is off."""
    # The mean is over the other groups alone: seeds of the same one would give it away.
    factor = fmean(_log_factor(measure, other) for other in ends if unit_of(other) != unit_of(end))
    return abs(factor - _log_factor(measure, end))


def _log_factor(measure: Measure, end: RunSummary) -> float:
    """Return the log of the annealed error over that of its reference."""
    reference = _reference(end)
    assert end.last is not None
    assert reference is not None
    return _log_error(measure, end.last) - _log_error(measure, reference)


def _log_error(measure: Measure, row: Row) -> float:
    return math.log(row[measure.column])


def _over_groups(differences: Sequence[float]) -> Estimate:
    """Return the mean over groups of runs, with the error that their spread shows."""
    error = stdev(differences) / math.sqrt(len(differences))
    return Estimate(fmean(differences), {"runs": ErrorSource(error, len(differences) - 1)})
