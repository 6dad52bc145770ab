"""A claim on what raises the error: that the loss converges, rather than that the rate decays.

arXiv 2604.15167 finds the INT4 error of Pythia-160m to rise once the loss no longer falls, earlier
than the rate decays much. arXiv 2510.06213 has it rise with the decay (`schedule.surge`). A run of
either schedule alone does not tell them apart, since under cosine both happen together. Two
comparisons with a constant rate do:

- At equal full-precision loss: weights whose rate decays pass the loss at which the constant rate
  ends. If the decay raises the error they have more of it there. If updates after convergence do,
  the constant rate has more: it came to the same loss by more updates.
- At the constant rate alone, from where the loss has converged: the error rises with the tokens.

It stays open whether more tokens or slower progress raise the error of the constant rate, which
come together. Where the constant-rate loss no longer falls at all, no annealed weights share it,
and the second comparison alone is left. Both are of the widths of the study, INT4 or not.
"""

from collections.abc import Sequence
from math import log2
from statistics import fmean

import numpy as np

from base.grouping import grouped
from dynamics.claims.schedule import annealed, doublings, growth_over, reach, unit_of
from dynamics.mechanism.equal_loss import differences, loss_column, measured_path, paths_from
from study.claims.finding import all_directed, of_groups
from study.claims.verdict import (
    Evidence,
    Measure,
    NotTested,
    Replicates,
    Verdict,
    claim,
    is_perturbed,
    judged,
    measures,
)
from study.definition import Study
from study.results.summary import HIGH, RunSummary
from study.results.table import Row
from train.run.config import RunConfig
from train.run.schedules import learning_rate

CONVERGED = 0.01  # of the loss: a doubling of the tokens lowers a converged one by less
LEAST = 3  # checkpoints of a converged phase: two show no trend beside their noise


def has_warmdowns(study: Study) -> bool:
    """Return whether anneals of different lengths share a control at a constant rate."""
    by_control = grouped(
        [run for run in study.trained if run.schedule.anneal and not is_perturbed(run)],
        lambda run: control.name if (control := study.control_of(run)) else "",
    )
    starts = {
        name: {run.schedule.anneal.start_step for run in runs if run.schedule.anneal}
        for name, runs in by_control.items()
        if name
    }
    return any(len(of_control) > 1 for of_control in starts.values())


@claim(
    "convergence",
    "Convergence raises the error, not the decay",
    figure="full_against_quantized",
    source="arXiv 2604.15167, abstract; against arXiv 2510.06213",
    needs="anneals of several lengths from a constant rate, with their controls, measured at"
    " several checkpoints, or a control whose loss falls by less than 1% per doubling of tokens",
    concerns=has_warmdowns,
)
def convergence(evidence: Evidence) -> list[Verdict]:
    """Compare annealed weights with the constant rate at equal loss, then the latter with itself.

    More error of the annealed weights at equal loss contradicts it, and so does an error that falls
    along the converged constant rate. No difference leaves it open: then the error follows the
    loss, however that came about.
    """
    by_spec = measures(evidence, evidence.study.quantization.specs)
    return [
        *(judged(f"{each.title}, decayed at equal loss", _decayed, each) for each in by_spec),
        *(judged(f"{each.title}, constant after convergence", _after, each) for each in by_spec),
    ]


def _constant(measure: Measure) -> list[RunSummary]:
    """Return the annealed ends whose control holds the rate at which their anneal starts.

    Raises:
        NotTested: there are none.
    """
    ends = [end for end in annealed(measure) if _holds_rate(measure, end)]
    if not ends:
        raise NotTested("no anneal starts at a rate that its control holds")
    return ends


def _holds_rate(measure: Measure, end: RunSummary) -> bool:
    control = measure.evidence.study.control_of(end.run)
    if control is None or not isinstance(end.run, RunConfig) or not end.run.schedule.anneal:
        return False
    start = learning_rate(control, end.run.schedule.anneal.start_step)
    return learning_rate(control, end.run.total_steps) >= HIGH * start


def _control(measure: Measure, end: RunSummary) -> RunConfig:
    control = measure.evidence.study.control_of(end.run)
    assert control
    return control


def _decayed(measure: Measure) -> Verdict:
    """Judge whether annealed weights have less error than the constant rate at equal loss."""

    def paths(end: RunSummary) -> tuple[list[Row], list[Row]]:
        assert isinstance(end.run, RunConfig)
        assert end.run.schedule.anneal
        start = end.run.schedule.anneal.start_step
        return paths_from(measure, (end.run, _control(measure, end)), start, end.run.total_steps)

    def contrast(group: Sequence[RunSummary]) -> Replicates:
        return differences(measure, {end.seed: paths(end) for end in group})

    parts, left_out = of_groups(grouped(_constant(measure), unit_of), contrast)
    said = ["annealed minus constant rate at equal loss", left_out]
    return all_directed(measure, parts, "lower", beside="; ".join(filter(None, said)))


def _after(measure: Measure) -> Verdict:
    """Judge whether the error rises along the converged part of a constant rate."""
    # Anneals of several lengths share a control: its longest stretch counts, once.
    ends = sorted(_constant(measure), key=lambda end: end.run.total_steps or 0)
    longest = {_control(measure, end).name: end for end in ends}
    spans = list[float]()

    def contrast(ends: Sequence[RunSummary]) -> Replicates:
        paths = {end.seed: _stable(measure, end) for end in ends}
        first = converged_from(loss_column(measure), list(paths.values()))
        if first is None:
            raise NotTested(
                f"the loss at the constant rate has not converged: over no {LEAST} last"
                f" checkpoints or more it falls by less than {CONVERGED:.0%} per doubling of the"
                " tokens"
            )
        kept = {seed: [row for row in path if row["step"] >= first] for seed, path in paths.items()}
        spans.extend(map(doublings, kept.values()))
        return {seed: growth_over(path) for seed, path in kept.items()}

    study = measure.evidence.study
    groups = grouped(longest.values(), lambda end: study.group_of(_control(measure, end)).label)
    parts, left_out = of_groups(groups, contrast)
    beside = f"slope x span over {reach(spans)} doublings of the tokens after convergence"
    return all_directed(
        measure, parts, "higher", beside="; ".join(filter(None, [beside, left_out]))
    )


def _stable(measure: Measure, end: RunSummary) -> list[Row]:
    """Return the rows of the control at its constant rate, up to the step of the end."""
    path = measured_path(
        measure, _control(measure, end), loss_column(measure), until=end.run.total_steps
    )
    return [row for row in path if row["phase"] == "stable" and row["tokens"]]


def converged_from(column: str, paths: Sequence[Sequence[Row]]) -> int | None:
    """Return the first step from which on the mean loss of some seeds has converged.

    From there to the end its trend over log2 of the tokens falls by less than `CONVERGED` of the
    last loss per doubling, over `LEAST` checkpoints or more; None where it does not.

    Example: it falls by 20%, then by 0.1% per doubling.
        >>> losses = {1: 5.0, 2: 4.0, 4: 3.996, 8: 3.992}
        >>> rows = [{"step": n, "tokens": n, "loss": loss} for n, loss in losses.items()]
        >>> converged_from("loss", [rows]), converged_from("loss", [rows[:3]])
        (2, None)
    """
    steps: list[int] = sorted(set.intersection(*({row["step"] for row in path} for path in paths)))
    by_step = [{row["step"]: row for row in path} for path in paths]
    places = [log2(by_step[0][step]["tokens"]) for step in steps]
    losses = [fmean(rows[step][column] for rows in by_step) for step in steps]
    for index in range(len(steps) - LEAST + 1):
        slope = float(np.polyfit(places[index:], losses[index:], 1)[0])
        if -slope < CONVERGED * losses[-1]:
            return steps[index]
    return None
