"""Claims on the amount of data: it raises the error under cosine, and not by itself."""

import json
from collections.abc import Callable, Iterable, Sequence

from dynamics.claims.finding import all_directed, conclude_within, times
from dynamics.claims.schedule import (
    MARGIN,
    annealed,
    doublings,
    effect_of_anneal,
    growth_over,
    reach,
    slope_over_tokens,
)
from dynamics.claims.verdict import Measure, NotTested, Replicates, Verdict, by_measure, claim
from study.results.paired import Weighted
from study.results.summary import DECAYED, RunSummary, enumeration
from train.run.config import RunConfig
from train.run.schedules import learning_rate

Chosen = list[RunSummary]


def alike(ends: Iterable[RunSummary], but: Iterable[str]) -> list[Chosen]:
    """Return groups of runs that are the same but for these keys of run.json, dotted.

    Names, places of checkpoints and what is not part of a run's identity may differ too.
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


def replicated(ends: Iterable[RunSummary], but: Iterable[str]) -> dict[str, list[Chosen]]:
    """Return groups of runs that are the same but for these keys, one for every seed.

    Each is under the labels of its runs, those of the first seed.
    """
    by_label: dict[str, list[Chosen]] = {}
    for group in alike(ends, [*but, "seed"]):
        by_seed: dict[int, Chosen] = {}
        for end in group:
            by_seed.setdefault(end.run.seed, []).append(end)  # type: ignore[union-attr]
        sets = [ends for ends in by_seed.values() if len({end.group for end in ends}) > 1]
        if sets:
            by_label[enumeration([end.group for end in sets[0]])] = sets
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
    70,
    "budgets",
    "More data alone does not raise the error",
    source="abstract, section 5, figure 5",
    needs="runs that hold the rate and anneal, and differ in their length alone, with controls",
)
@by_measure
def budgets(of: Measure) -> Verdict:
    """Compare the change over ends of cooldowns that differ in length alone with a margin.

    Not raising is one-sided: an error that falls with the tokens is in agreement.
    """
    groups = replicated(_of_schedule(of.evidence.ends, _is_cooldown), LENGTH)
    if not groups:
        raise NotTested("no two runs hold the rate, then anneal, and differ in their length alone")
    tested = {end.run.name for end in annealed(of)}
    if not all(end.run.name in tested for sets in groups.values() for ends in sets for end in ends):
        raise NotTested("an annealed run has no control at equal tokens")

    changes, margins, spans = dict[str, Replicates](), dict[str, Replicates](), set[float]()
    for label, sets in groups.items():
        rows = [[of.end(end) for end in ends] for ends in sets]
        changes[label] = list(map(growth_over, rows))
        margins[label] = [_share_of_anneal(of, ends) for ends in sets]
        spans |= set(map(doublings, rows))

    beside = (
        f"slope x span over {reach(spans)} doublings of the budget; the margin is {MARGIN:g} of the"
        " mean change by the anneal; one-sided"
    )
    return conclude_within(of, changes, margins, two_sided=False, beside=beside)


def _share_of_anneal(of: Measure, ends: Sequence[RunSummary]) -> Weighted:
    """Return the share MARGIN of what the anneals of some runs do on average."""
    share = MARGIN / len(ends)
    return [part for end in ends for part in times(share, effect_of_anneal(of, end))]


@claim(
    80,
    "schedules",
    "The error grows faster under cosine",
    source="figure 5",
    needs="two budgets under each of the two schedules, cosine and a constant rate with cooldown",
)
@by_measure
def schedules(of: Measure) -> Verdict:
    """Compare the change over the budgets under cosine with that under cooldowns."""
    chosen = [end for fits in KINDS for end in _of_schedule(of.evidence.ends, fits)]
    parts = dict[str, Replicates]()
    for label, sets in replicated(chosen, ("total_steps", "schedule")).items():
        contrasts = []
        for ends in sets:
            kinds = [_of_schedule(ends, fits) for fits in KINDS]
            if min(len({end.run.total_steps for end in kind}) for kind in kinds) < 2:
                continue
            rows = [[of.end(end) for end in kind] for kind in kinds]
            span = min(map(doublings, rows))  # both slopes over the same doublings
            cosine, cooldown = map(slope_over_tokens, rows)
            contrasts.append(times(span, [*cosine, *times(-1, cooldown)]))
        if contrasts:
            parts[label] = contrasts
    if not parts:
        raise NotTested(
            "no two budgets under each of cosine and constant rate with cooldown, all else the same"
        )
    beside = "slope x span over the budgets under cosine minus that under cooldowns"
    return all_directed(of, parts, "higher", beside=beside)
