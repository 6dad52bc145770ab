"""Claims on training at changed weights: QAT, noise and SAM, each against the same run without it.

An arm is a run with a perturbation, its control the same run without one. Both are compared at the
lowest full-precision loss that they share from the last checkpoint before the perturbation on,
since a run that ends at a higher loss may have less error for that alone. Arms are paired with
their controls by seed and document. An arm that names a grid, QAT or noise, is judged at the specs
of that format and width.

The error is first the loss increase. A KL divergence has the same weights in full precision as its
reference, which QAT does not train: it may fall where the quantized model is no better.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from base.grouping import grouped
from dynamics.claims.schedule import change
from dynamics.mechanism.equal_loss import differences, paths_from
from quant_eval.specs import parse_spec
from study.claims.finding import (
    Finding,
    all_directed,
    conclude,
    directed,
    mean_of,
    of_groups,
    times,
    unpaired,
)
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
    needed,
)
from study.definition import Study
from study.measurements.kind import Column
from study.measurements.quantization import DIVERGENCE, LOSS_INCREASE, QUANTIZED_LOSS
from study.results.averages import averagings_of, kept_averages
from study.results.paired import Weighted
from study.results.summary import RunSummary, enumeration
from study.results.table import Row
from train.run.config import RunConfig
from train.run.optimization import Lawa
from train.run.perturbation import Noise, Qat, Sam

ERRORS = (LOSS_INCREASE, DIVERGENCE)
KINDS = {"QAT": Qat, "noise": Noise, "SAM": Sam}
FORGOTTEN = 0.01  # share of older weights in an EMA that is taken as none


class Arm(NamedTuple):
    """An end of training at changed weights, and the run that it is compared with.

    Attributes:
        end: of the perturbed run.
        control: the same run without the perturbation, saved where the other ends.
        before: the last step whose weights no perturbed update has changed.
    """

    end: RunSummary
    control: RunConfig
    before: int

    @property
    def run(self) -> RunConfig:
        """The perturbed run."""
        assert isinstance(self.end.run, RunConfig)
        return self.end.run


Fits = Callable[[Arm, str], bool]  # an arm is meant to be judged at a spec


def has_arms(study: Study) -> bool:
    """Return whether any run of a study computes at changed weights."""
    return any(map(is_perturbed, study.trained))


def has_qat(study: Study) -> bool:
    """Return whether any run of a study is trained with QAT."""
    return any(isinstance(run.perturbation, Qat) for run in study.trained)


def arms_of(evidence: Evidence) -> list[Arm]:
    """Return the perturbed ends of training that have a control, with it."""
    study, arms = evidence.study, []
    for end in evidence.ends:
        control = study.unperturbed_of(end.run)
        if control and control.name not in evidence.diverged:
            assert isinstance(end.run, RunConfig)
            first = _first_perturbed(study, end.run)
            assert first, "a run with a control is perturbed"
            arms.append(Arm(end, control, first - 1))
    return arms


def _first_perturbed(study: Study, run: RunConfig) -> int | None:
    """Return the first perturbed update that led to the end of a run, before a branch too."""
    if run.branch_from:
        first = _first_perturbed(study, study.parent_of(run))
        if first and first <= run.branch_from.step:
            return first
    return run.perturbed_from


def _without_control(evidence: Evidence) -> str:
    """Return in words the perturbed ends without a control; empty for none."""
    compared = {arm.run.name for arm in arms_of(evidence)}
    ends = [end for end in evidence.ends if is_perturbed(end.run) and end.run.name not in compared]
    return f"without a control: {enumeration([end.label for end in ends])}" if ends else ""


def _grid(spec: str) -> tuple[str, int]:
    """Return format and width of a spec's weights."""
    parsed = parse_spec(spec)
    return parsed.settings().get("format", ""), parsed.bits


def is_for(arm: Arm, spec: str) -> bool:
    """Return whether an arm is meant for a spec: it names no grid, or that format and width."""
    perturbation = arm.run.perturbation
    if isinstance(perturbation, Qat | Noise):
        return _grid(perturbation.spec) == _grid(spec)
    return True


def is_for_another_width(arm: Arm, spec: str) -> bool:
    """Return whether an arm is QAT for the format of a spec, at another width."""
    perturbation = arm.run.perturbation
    if not isinstance(perturbation, Qat):
        return False
    (trained_format, trained_bits), (form, bits) = map(_grid, (perturbation.spec, spec))
    return trained_format == form and trained_bits != bits


def _lower(measure: Measure, arms: Sequence[Arm]) -> Verdict:
    """Judge whether arms have less error than their controls at equal loss; their mean decides."""

    def paths(arm: Arm) -> tuple[list[Row], list[Row]]:
        return paths_from(measure, (arm.run, arm.control), arm.before, arm.run.total_steps)

    def contrast(group: Sequence[Arm]) -> Replicates:
        return differences(measure, {arm.end.seed: paths(arm) for arm in group})

    parts, left_out = of_groups(grouped(arms, lambda arm: arm.end.group), contrast)
    said = ["arm minus control at equal loss", left_out, _without_control(measure.evidence)]
    beside = "; ".join(filter(None, said))
    return all_directed(measure, parts, "lower", beside=beside, are_unlike=True)


def _by_measure(
    evidence: Evidence, fits: Fits, figures: Sequence[Column] = ERRORS
) -> list[Verdict]:
    """Return a verdict on the arms that fit each spec, those of the fewest bits first."""
    arms, every = arms_of(evidence), evidence.study.quantization.everywhere
    specs = [spec for spec in every if any(fits(arm, spec) for arm in arms)]
    return [
        judged(measure.title, _lower, measure, [arm for arm in arms if fits(arm, measure.spec)])
        for measure in measures(evidence, specs, figures)
    ]


@claim(
    "interventions",
    "Interventions lower the error at equal loss",
    figure="interventions",
    source="QAT in the cooldown: arXiv 2509.22935; SAM: arXiv 2605.02105",
    needs="a run with a perturbation (QAT, noise, SAM) and the same run without it, measured at"
    " several checkpoints after its begin, at a spec of the format and width of its grid",
    concerns=has_arms,
)
def interventions(evidence: Evidence) -> list[Verdict]:
    """Compare all arms at the specs they are for, then each kind of intervention by itself.

    An error of the arms above that of the controls at the same loss contradicts it. A lower error
    at a higher loss is no support: an anneal that is stopped early has that, too.
    """
    verdicts = _by_measure(evidence, is_for)
    kinds = {type(arm.run.perturbation) for arm in arms_of(evidence)}
    for name, kind in KINDS.items() if len(kinds) > 1 else ():
        fits = partial(_is_of_kind, kind)
        verdicts += [
            verdict._replace(measure=f"{name}: {verdict.measure}")
            for verdict in _by_measure(evidence, fits, (LOSS_INCREASE,))
        ]
    return verdicts


def _is_of_kind(kind: type, arm: Arm, spec: str) -> bool:
    return isinstance(arm.run.perturbation, kind) and is_for(arm, spec)


@claim(
    "widths",
    "QAT at one width helps at others",
    figure="interventions",
    source="questioned by arXiv 2502.00490, section 6, on images: a regularizer is better than QAT"
    " at widths that neither was for",
    needs="a run with QAT and the same run without it, and a spec of the same format at another"
    " width, measured at several checkpoints after its begin",
    concerns=has_qat,
)
def widths(evidence: Evidence) -> list[Verdict]:
    """Compare QAT arms with their controls at equal loss, at the widths they were not trained for.

    An error above that of the controls contradicts it: then QAT is a choice of one width.
    """
    return _by_measure(evidence, is_for_another_width)


@claim(
    "qat-averages",
    "Averages after QAT undo it",
    figure="interventions",
    source="github.com/openai/parameter-golf, pull request 989; pull request 238 has the opposite"
    " without QAT",
    needs="an average of weights within the part of a run with QAT (a soup, LAWA or EMA), and the"
    " same average of the same run without QAT",
    concerns=has_qat,
)
def qat_averages(evidence: Evidence) -> list[Verdict]:
    """Judge each average of perturbed weights, at the specs that QAT was for.

    Undone is QAT where the average has more than the error of the weights at its step, and by more
    than the same average has without QAT. Less error than these weights, or no more than without
    QAT, contradicts it. The comparison is at equal tokens: an average lags, and its loss differs.
    """
    arms = [arm for arm in arms_of(evidence) if isinstance(arm.run.perturbation, Qat)]
    every = evidence.study.quantization.everywhere
    specs = [spec for spec in every if any(is_for(arm, spec) for arm in arms)]
    return [
        judged(f"{average.words}: {measure.title}", _undone, measure, average.name, of_average)
        for average in averagings_of(evidence.study)
        if (of_average := [arm for arm in arms if _step_of(evidence.study, average.name, arm)])
        for measure in measures(evidence, specs, (*ERRORS, QUANTIZED_LOSS))
    ]


def _step_of(study: Study, average: str, arm: Arm) -> int | None:
    """Return the last step at which a run has an average of perturbed weights alone."""
    steps = [model.step for model in study.models_of(arm.run) if model.average == average]
    return steps[-1] if steps and _oldest(study, average, steps[-1]) > arm.before else None


def _oldest(study: Study, average: str, step: int) -> float:
    """Return the step of the oldest weights in an average that is made at a step."""
    soups = {soup.name: soup for soup in study.soups}
    if average in soups:
        return soups[average].steps[0]
    (kept,) = (kept for kept in kept_averages(study) if kept.name == average)
    if isinstance(kept, Lawa):
        last = step - step % kept.interval_steps  # the newest of the window
        return last - (kept.window - 1) * kept.interval_steps
    return step - kept.interval_steps * math.log(FORGOTTEN) / math.log(kept.decay)


def _undone(measure: Measure, average: str, arms: Sequence[Arm]) -> Verdict:
    fitting = [arm for arm in arms if is_for(arm, measure.spec)]
    if not fitting:
        raise NotTested("no average of perturbed weights is of an arm for this spec")
    groups = grouped(fitting, lambda arm: arm.end.group)

    def by_group(of_arm: Callable[[Arm], Weighted]) -> dict[str, Replicates]:
        return {
            label: {arm.end.seed: of_arm(arm) for arm in group} for label, group in groups.items()
        }

    def row(arm: Arm, run: RunConfig, name: str | None = None) -> Row:
        return _row(measure, run, _step_of(measure.evidence.study, average, arm), name)

    def raised(arm: Arm, run: RunConfig) -> Weighted:
        return change(row(arm, run), row(arm, run, average))

    def gain(arm: Arm, name: str | None) -> Weighted:
        return change(row(arm, arm.control, name), row(arm, arm.run, name))

    raise_of = by_group(lambda arm: raised(arm, arm.run))
    beyond = by_group(lambda arm: [*raised(arm, arm.run), *times(-1, raised(arm, arm.control))])
    whole = _mean(beyond)
    gains = {
        "weights": by_group(lambda arm: gain(arm, None)),
        "averages": by_group(lambda arm: gain(arm, average)),
    }
    words = [
        f"{name} {measure.effect(measure.estimate(_mean(parts)))}" for name, parts in gains.items()
    ]
    return conclude(
        measure,
        (_both_raised(measure, _mean(raise_of), whole), measure.estimate(whole)),
        {label: _both_raised(measure, raise_of[label], beyond[label]) for label in groups},
        "undone",
        [f"QAT minus control: {', '.join(words)}", unpaired(measure, whole)],
    )


def _mean(parts: Mapping[str, Replicates]) -> Replicates:
    return mean_of(list(parts.values()))


def _row(measure: Measure, run: RunConfig, step: int | None, average: str | None) -> Row:
    """Return the row of an average, or of the weights, of a run at a step."""
    place = (run.name, step, average)
    rows = (
        row for row in measure.evidence.rows if (row["run"], row["step"], row["average"]) == place
    )
    label = measure.evidence.study.label_of(run)
    return needed(f"{average or 'weights'} of {label}", next(rows, None), measure.column)


def _both_raised(measure: Measure, by_average: Replicates, more_by: Replicates) -> Finding:
    """Test that an average raises the error, and by more than without QAT.

    Undone takes both: the larger p-value decides (Berger 1982, intersection-union test). One of
    them the other way refutes it: the smaller p-value of those, times 2 (Bonferroni).
    """
    raised, beyond = directed(measure, by_average), directed(measure, more_by)
    words = f"average minus weights {raised.words}, beyond that without QAT {beyond.words}"
    against = [finding.p for finding in (raised, beyond) if finding.way == "lower"]
    if not against:
        return Finding("undone", max(raised.p, beyond.p), words)
    return Finding("kept", min(1.0, 2 * min(against)), words)
