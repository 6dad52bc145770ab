"""The effect of each factor of a study on the ends of training.

Two ends are compared that are the same but for the factor, and of one seed. Their difference is
estimated as those of the claims are, see `study.results.paired`.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quant_eval.estimate import Estimate
from study.axes import Axis, Value
from study.definition import Study
from study.measurements.kind import Column
from study.measurements.quantization import CROSS_ENTROPY
from study.results.paired import Paired, Weighted
from study.results.summary import Rows, RunSummary, summarize
from study.results.table import Row
from train.run.config import RunConfig

Place = tuple[Value, ...]  # the values of a run on the other axes
Pair = tuple[Row, Row]  # the end at the reference, and at the other value


class Measured(NamedTuple):
    """A figure of a quantization; the loss in full precision is that beside the first one."""

    spec: str
    figure: Column


class Effect(NamedTuple):
    """The effect of another value of a factor than the reference, on one figure.

    Attributes:
        reference: the text of the first value.
        value: the text of the other.
        measure: the figure.
        estimate: figure at the value minus figure at the reference.
        pairs: how many pairs of runs are compared.
    """

    reference: str
    value: str
    measure: Measured
    estimate: Estimate
    pairs: int


def measures(study: Study) -> list[Measured]:
    """Return what effects are measured by: the final loss, and the errors at every spec."""
    specs = study.quantization.specs
    errors = [Measured(spec, figure) for spec in specs for figure in study.quantization.measures]
    return [Measured(specs[0], CROSS_ENTROPY), *errors]


def effects_of(study: Study, rows: Rows, paired: Paired) -> dict[str, list[Effect]]:
    """Return the effects of every factor, by the key of its axis; none of a released model."""
    # Stages of a released model follow each other; none is a treatment of the others.
    if len(study.trained) < len(study.runs):
        return {}
    ends = [end for end in summarize(study, rows) if end.last is not None]
    return {
        axis.key: list(_effects_on(study, axis, ends, paired))
        for axis in study.axes
        if len({axis.values[end.run.name] for end in ends}) > 1
    }


def _effects_on(
    study: Study, axis: Axis, ends: Sequence[RunSummary], paired: Paired
) -> Iterator[Effect]:
    """Yield the effects of an axis: each value against the least number, or the first word."""
    texts = {axis.values[end.run.name]: axis.text_of(end.run.name) for end in ends}
    # The least number is the reference; of words the first, since sorting is stable.
    reference, *others = sorted(texts, key=_rank)
    for value in others:
        pairs = _pairs(study, axis, ends, (reference, value))
        for measure in measures(study):
            replicates = _replicates(pairs, measure.figure.of(measure.spec))
            if replicates:
                estimate = paired.estimate(replicates, measure.spec, measure.figure)
                count = sum(map(len, replicates)) // 2
                yield Effect(texts[reference], texts[value], measure, estimate, count)


def _rank(value: Value) -> tuple[bool, float]:
    """Numbers by size, then words in the order of the study."""
    return (True, 0.0) if isinstance(value, str) else (False, float(value))


def _pairs(
    study: Study, axis: Axis, ends: Sequence[RunSummary], values: tuple[Value, Value]
) -> dict[int, dict[Place, Pair]]:
    """Return the ends at both values by seed, and by their values on the other axes.

    Ends that no axis distinguishes are not paired.
    """
    # Pairs have equal values on all of these, so that the factor alone differs.
    others = [other for other in study.axes if other is not axis]
    places: dict[tuple[int, Place], dict[Value, list[Row]]] = {}
    for end in ends:
        assert end.last is not None
        assert isinstance(end.run, RunConfig)
        name = end.run.name
        key = end.run.seed, tuple(other.values[name] for other in others)
        places.setdefault(key, {}).setdefault(axis.values[name], []).append(end.last)
    pairs: dict[int, dict[Place, Pair]] = {}
    for (seed, elsewhere), by_value in places.items():
        first, second = (by_value.get(value, []) for value in values)
        # Two runs at one place differ in what no axis says, so none of them is the partner.
        if len(first) == len(second) == 1:
            pairs.setdefault(seed, {})[elsewhere] = first[0], second[0]
    return pairs


def _replicates(pairs: dict[int, dict[Place, Pair]], column: str) -> list[Weighted]:
    """Return for each seed the mean difference over the other axes; of what all seeds measured."""
    measured = {
        seed: {
            elsewhere: pair
            for elsewhere, pair in by_place.items()
            if all(row[column] is not None and math.isfinite(row[column]) for row in pair)
        }
        for seed, by_place in pairs.items()
    }
    by_seed = [by_place for by_place in measured.values() if by_place]
    if not by_seed:
        return []
    first, *others = by_seed
    # Each seed averages over the same places, else places would pass for seeds.
    shared = [each for each in first if all(each in seed for seed in others)]
    return [
        [
            part
            for reference, other in (of_seed[each] for each in shared)
            for part in ((other, 1 / len(shared)), (reference, -1 / len(shared)))
        ]
        for of_seed in (by_seed if shared else [])
    ]
