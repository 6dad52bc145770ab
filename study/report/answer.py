"""The answer of a study in one or two lines, which its report begins with."""

from collections.abc import Mapping, Sequence

from base.quantities import MILLI, MILLINATS, with_interval
from base.statistics import INTERVAL_LEVEL
from study.axes import Axis
from study.claims.page import Line
from study.claims.verdict import ALPHA
from study.definition import Study
from study.measurements.titles import spec_title
from study.results.averages import lowest_spec
from study.results.effects import Effect, Measured

DECIDED = ("supported", "contradicted")


def answer(study: Study, effects: Mapping[str, Sequence[Effect]], claims: Sequence[Line]) -> str:
    """Return what the study found: the effect of its first factor, and a decided claim.

    Empty where nothing of both is measured.
    """
    sentences = [
        _effect(study, axis, effects[axis.key]) for axis in study.axes if axis.key in effects
    ]
    sentences = [sentence for sentence in sentences if sentence][:1]
    decided = sorted(
        (line for line in claims if line.outcome in DECIDED),
        key=lambda line: DECIDED.index(line.outcome),
    )
    sentences += [f"{line.claim.sentence}: {line.words}, {_size(line)}." for line in decided[:1]]
    return " ".join(sentences)


def _effect(study: Study, axis: Axis, effects: Sequence[Effect]) -> str:
    """Return the effect of the last value of a factor on the error; empty where it is not known."""
    primary = Measured(lowest_spec(study), study.quantization.measures[0])
    measured = [effect for effect in effects if effect.measure == primary]
    if not measured:
        return ""
    # The last value is the farthest from the first, which it is compared with.
    *_, effect = measured
    estimate, figure = effect.estimate, primary.figure
    scale, unit = (100.0, "%") if figure.is_share else (MILLI, f" {MILLINATS}")
    size = with_interval(estimate.value, *estimate.interval(), scale)

    way = "higher" if estimate.value > 0 else "lower"
    these = "" if estimate.holds_seeds else " in these trainings"
    p = estimate.p_value()
    relation = f"is {way}{these} than" if p <= ALPHA else "does not differ significantly from that"
    return (
        f"At {axis.name} {effect.value} the {figure.title} ({spec_title(primary.spec)})"
        f" {relation} at {effect.reference}: difference {size}{unit}"
        f" ({INTERVAL_LEVEL:.0%} interval), p {p:.2g}."
    )


def _size(line: Line) -> str:
    """Return the effect of a claim with its unit, which its words leave out where it is nats."""
    return f"{line.effect} {MILLINATS}" if line.effect.endswith("]") else line.effect
