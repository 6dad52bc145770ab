"""Optimizers by their quantization error, each at its best peak learning rate by the loss."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dynamics.choices.arms import Ranked, ranked, sweeps
from dynamics.claims.data import alike
from study.axes import amount_name
from study.claims.verdict import Evidence, Measure, NotTested
from study.measurements.quantization import CROSS_ENTROPY
from study.results.summary import RunSummary
from train.run.config import RunConfig


class AtBest(NamedTuple):
    """The ends of an optimizer at its best peak, by seed, with their full-precision loss."""

    peak: float
    loss: float  # nats per token, mean over seeds
    ends: Sequence[RunSummary]
    is_outermost: bool  # no peak beyond it was tried


def at_best_peak(measure: Measure) -> dict[str, AtBest]:
    """Return each optimizer of hidden matrices at the peak with the lowest loss at the end.

    Of runs that anneal; empty unless every optimizer has one sweep of peaks, with the same seeds,
    and they differ in the optimizer alone.

    Raises:
        NotTested: the loss at an end is not measured.
    """
    by_loss = measure.by(figure=CROSS_ENTROPY)
    best: dict[str, AtBest] = {}
    found = sweeps(measure.evidence.annealed)
    for sweep in found:
        arms = list(sweep.ends.values())  # by rising peak
        losses = [
            float(np.mean([by_loss.end(end)[by_loss.column] for end in ends])) for ends in arms
        ]
        index = int(np.argmin(losses))
        run = arms[index][0].run
        assert isinstance(run, RunConfig)
        optimizer, outermost = run.optimizer, index in (0, len(arms) - 1)
        best[optimizer.matrices] = AtBest(optimizer.peak_lr, losses[index], arms[index], outermost)
    seeds = {tuple(end.seed for end in each.ends) for each in best.values()}
    is_one_each = len(best) == len(found) and len(seeds) == 1
    groups = alike([each.ends[0] for each in best.values()], ("optimizer",))
    return best if is_one_each and [len(group) for group in groups] == [len(best)] else {}


def optimizers_line(evidence: Evidence) -> str:
    """Return the ranking of optimizers at their best peaks in words; empty without two of them."""
    quantization = evidence.study.quantization
    measure = Measure(evidence, quantization.specs[0], quantization.measures[0])
    try:
        best = at_best_peak(measure)
        if len(best) < 2:
            return ""
        choices = {
            matrices: [[(measure.end(end), 1.0)] for end in each.ends]
            for matrices, each in best.items()
        }
    except NotTested:
        return ""
    parts = [
        _words(measure, best[entry.label], entry)
        for entry in ranked(choices, evidence.paired, measure.spec, measure.figure)
    ]
    tokens = next(iter(choices.values()))[0][0][0]["tokens"]
    return (
        f"{_titled(measure)}, each optimizer of hidden matrices at the peak learning rate with the"
        f" lowest full-precision loss after {amount_name(tokens).upper()} tokens:"
        f" {'; '.join(parts)}. They end at different losses, on which the error depends as well."
        f"{_beyond(best)}"
    )


def _titled(measure: Measure) -> str:
    """Return the name of a measure with the unit of the values after it."""
    return f"{measure.title} in {measure.unit}" if measure.unit else measure.title


def _words(measure: Measure, each: AtBest, entry: Ranked) -> str:
    words = f"{entry.label} at {each.peak:g} ({each.loss:.4f} nats)"
    if entry.excess is None:
        return f"{words} has the lowest, {measure.effect(entry.estimate)}"
    return f"{words} {measure.effect(entry.excess)} more, Holm p {entry.p_adjusted:.2g}"


def _beyond(best: dict[str, AtBest]) -> str:
    """Return a sentence on optimizers whose best peak is the lowest or highest that was tried."""
    outermost = [matrices for matrices, each in best.items() if each.is_outermost]
    if not outermost:
        return ""
    return f" No peak beyond the best of {', '.join(outermost)} was tried: a better one may exist."
