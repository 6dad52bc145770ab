"""Claims on the amount of data: it raises the error under cosine, which decays later, and not by itself."""

import json
from collections.abc import Callable, Iterable

from ckpt_tools.holm import holm
from study.claims.schedule import MARGIN, change, slope, times
from study.claims.verdict import ALPHA, Evidence, Judged, estimated, missing, not_tested, outcome_of, told_above
from study.summary import DECAYED, RunSummary, listed
from train.config import RunConfig
from train.schedules import learning_rate

Chosen = list[RunSummary]


def alike(ends: Iterable[RunSummary], but: Iterable[str]) -> list[Chosen]:
    """Runs that are the same but for these keys of run.json, dotted; groups of two or more.

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


def _of_schedule(evidence: Evidence, fits: Callable[[RunConfig], bool]) -> list[RunSummary]:
    return [end for end in evidence.ends if isinstance(end.run, RunConfig) and fits(end.run)]


def budgets(evidence: Evidence, spec: str, figure: str) -> Judged:
    """Slope over the ends of cooldowns that differ in length alone, against the margin of their mean rise.

    Not raising is one-sided: an error that falls with the tokens is in agreement.
    """
    groups = alike(_of_schedule(evidence, _is_cooldown), LENGTH)
    if not groups:
        return not_tested("no two runs hold the rate, then anneal, and differ in their length alone")
    below, beyond, parts = [], [], []
    for group in groups:
        gap = _gap(group, f"quant/{spec}/{figure}")
        if gap:
            return not_tested(gap)
        both = [(end.first, end.last) for end in group if end.first and end.last]
        trend = slope([last for _, last in both])
        rise = [one for first, last in both for one in change(first, last, 1 / len(both))]
        margin, own = times(MARGIN, rise), evidence.contrast(spec, figure, trend)
        below.append([evidence.contrast(spec, figure, margin, times(-1, trend))])
        beyond.append([own, evidence.contrast(spec, figure, trend, times(-1, margin))])
        parts.append(
            f"{len(both)} budgets ({listed([end.label for end in group])}): {estimated(own, figure)} per doubling, "
            f"{estimated(evidence.contrast(spec, figure, rise), figure)} in the anneal"
        )
    agrees = told_above(below, one_sided=True)
    against = told_above(beyond, one_sided=True)
    words = (
        f"slope over the ends below {MARGIN:g} of the mean change in the anneal told for {sum(agrees)} of "
        f"{len(groups)} groups of runs, above it for {sum(against)} (paired over documents, one-sided, Holm): "
        f"{'; '.join(parts)}"
    )
    if all(agrees):
        return Judged("supported", words)
    return Judged("contradicted" if any(against) and not any(agrees) else "not decided", words)


def schedules(evidence: Evidence, spec: str, figure: str) -> Judged:
    """Slope over the budgets under cosine minus that under cooldowns from a constant rate."""
    chosen = [*_of_schedule(evidence, _is_cosine), *_of_schedule(evidence, _is_cooldown)]
    differences, parts = [], []
    for group in alike(chosen, ("total_steps", "schedule")):
        kinds = [[end for end in group if isinstance(end.run, RunConfig) and fits(end.run)] for fits in KINDS]
        if min(len({end.run.total_steps for end in kind}) for kind in kinds) < 2:
            continue
        for end in group:
            gap = missing([(f"the end of {end.label}", end.last, f"quant/{spec}/{figure}")])
            if gap:
                return not_tested(gap)
        cosine, cooldown = (slope([end.last for end in kind if end.last]) for kind in kinds)
        differences.append(evidence.contrast(spec, figure, cosine, times(-1, cooldown)))
        each = [estimated(evidence.contrast(spec, figure, weighted), figure) for weighted in (cosine, cooldown)]
        parts.append(
            f"{len(cosine)} and {len(cooldown)} budgets: {each[0]} per doubling under cosine, {each[1]} under "
            f"cooldowns, difference {estimated(differences[-1], figure)}"
        )
    if not differences:
        return not_tested("no two budgets under each of cosine and constant rate with cooldown, all else the same")
    p_values = holm([one.p_value() for one in differences])
    told = [
        "not told apart" if p > ALPHA else "higher" if one.value > 0 else "lower"
        for one, p in zip(differences, p_values, strict=True)
    ]
    words = f"paired over documents, Holm, p {max(p_values):.2g}: {'; '.join(parts)}"
    return Judged(outcome_of(told, "higher"), words)


def _gap(group: Chosen, column: str) -> str | None:
    return missing(
        wanted
        for end in group
        for wanted in ((f"{end.label} before the anneal", end.first, column), ("its end", end.last, column))
    )
