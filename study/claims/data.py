"""Claims on the amount of data: it raises the error under cosine, and not by itself."""

import json
from collections.abc import Callable, Iterable

from study.claims.schedule import MARGIN, change, slope, times
from study.claims.verdict import (
    Measure,
    NotTested,
    Verdict,
    against_zero,
    by_measure,
    claim,
    decided,
    needed,
    outcome_of,
    significant_above,
)
from study.results.summary import DECAYED, RunSummary, listed
from train.run.config import RunConfig
from train.run.schedules import learning_rate

Chosen = list[RunSummary]


def alike(ends: Iterable[RunSummary], but: Iterable[str]) -> list[Chosen]:
    """Return groups of runs that are the same but for these keys of run.json, dotted.

    Names, places of checkpoints and what is no part of a run's identity may differ too.
    """
    ignored = {*but, *RunConfig.NOT_IDENTITY, "save_steps", "evaluate_every_steps", "branch_from"}
    groups: dict[str, Chosen] = {}
    for end in ends:
        if isinstance(end.run, RunConfig):
            content = end.run.model_dump(mode="json")
            for key in ignored:
                *parents, last = key.split(".")
                place = content
                for parent in parents:
                    place = place.get(parent) or {}
                place.pop(last, None)
            groups.setdefault(json.dumps(content, sort_keys=True), []).append(end)
    return [group for group in groups.values() if len(group) > 1]


LENGTH = ("total_steps", "schedule.anneal.start_step", "schedule.phase.horizon_tokens")


def _is_cooldown(run: RunConfig) -> bool:
    """A constant rate, then an anneal: WSD."""
    return run.schedule.phase.kind == "constant" and run.schedule.anneal is not None


def _is_cosine(run: RunConfig) -> bool:
    """A cosine that is most of the way down at the end."""
    decayed = learning_rate(run, run.total_steps) <= DECAYED * run.optimizer.peak_lr
    return run.schedule.phase.kind == "cosine" and run.schedule.anneal is None and decayed


KINDS = (_is_cosine, _is_cooldown)


def _of_schedule(ends: Iterable[RunSummary], fits: Callable[[RunConfig], bool]) -> list[RunSummary]:
    return [end for end in ends if isinstance(end.run, RunConfig) and fits(end.run)]


@claim(
    70,
    "budgets",
    "More data does not by itself raise the error: it does not grow with the length of the"
    " constant phase.",
    source="abstract, section 5, figure 5",
    needs="runs that hold the rate and anneal, and differ in their length alone",
)
@by_measure
def budgets(of: Measure) -> Verdict:
    """Test the slope over ends of cooldowns that differ in length alone, against a margin.

    Not raising is one-sided: an error that falls with the tokens is in agreement.
    """
    groups = alike(_of_schedule(of.evidence.ends, _is_cooldown), LENGTH)
    if not groups:
        raise NotTested("no two runs hold the rate, then anneal, and differ in their length alone")
    below, beyond, slopes, parts = [], [], [], []
    for group in groups:
        both = [
            (needed(f"{end.label} before the anneal", end.first, of.column), of.end(end))
            for end in group
        ]
        trend = slope([last for _, last in both])
        rise = [one for first, last in both for one in change(first, last, 1 / len(both))]
        margin, growth = times(MARGIN, rise), of.contrast(trend)
        below.append([of.contrast(margin, times(-1, trend))])
        beyond.append([growth, of.contrast(trend, times(-1, margin))])
        slopes.append(growth.value)
        parts.append(
            f"{len(both)} budgets ({listed([end.label for end in group])}):"
            f" {of.estimated(growth)} per doubling,"
            f" {of.estimated(of.contrast(rise))} in the anneal"
        )
    agreeing = sum(significant_above(below, one_sided=True))
    opposing = sum(significant_above(beyond, one_sided=True))
    words = (
        f"slope over the ends significantly below {MARGIN:g} of the mean change in the anneal for"
        f" {agreeing} of {len(groups)} groups of runs, above it for {opposing} (paired over"
        f" documents, one-sided, Holm): {'; '.join(parts)}"
    )
    effect = f"{of.spread(slopes)} per doubling of the tokens"
    return Verdict(decided(agreeing, opposing, len(groups)), words, effect)


@claim(
    80,
    "schedules",
    "Under cosine the error grows faster with the data than under cooldowns from a constant rate.",
    source="figure 5",
    needs="two budgets under each of the two schedules",
)
@by_measure
def schedules(of: Measure) -> Verdict:
    """Test the slope over the budgets under cosine minus that under cooldowns."""
    chosen = [end for fits in KINDS for end in _of_schedule(of.evidence.ends, fits)]
    differences, parts = [], []
    for group in alike(chosen, ("total_steps", "schedule")):
        kinds = [_of_schedule(group, fits) for fits in KINDS]
        if min(len({end.run.total_steps for end in kind}) for kind in kinds) < 2:
            continue
        cosine, cooldown = (slope([of.end(end) for end in kind]) for kind in kinds)
        differences.append(of.contrast(cosine, times(-1, cooldown)))
        parts.append(
            f"{len(cosine)} and {len(cooldown)} budgets:"
            f" {of.estimated(of.contrast(cosine))} per doubling under cosine,"
            f" {of.estimated(of.contrast(cooldown))} under cooldowns,"
            f" difference {of.estimated(differences[-1])}"
        )
    if not differences:
        raise NotTested(
            "no two budgets under each of cosine and constant rate with cooldown, all else the same"
        )
    ways, p_values = against_zero(differences)
    words = f"paired over documents, Holm, p {max(p_values):.2g}: {'; '.join(parts)}"
    slopes = of.spread([one.value for one in differences])
    return Verdict(outcome_of(ways, "higher"), words, f"slopes differ by {slopes} per doubling")
