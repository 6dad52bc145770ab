"""Claims on curvature: flatter minima quantize better, and averages are flatter.

The unit of all tests is the training, a run with all that branches from it: their checkpoints share
updates and are not independent.
"""

import math
from collections.abc import Callable
from functools import partial

from dynamics.mechanism.checkpoints import (
    MEASURES,
    Averaged,
    at_equal_loss,
    averaged,
    checkpoints,
    divergence_of,
    log_ratio,
    loss_of,
    training_of,
)
from dynamics.mechanism.correlation import Ratio, given_loss_and_tokens, mean_ratio
from dynamics.mechanism.formula import (
    BASELINES,
    MODELS,
    LogLinear,
    Observations,
    errors,
    observe,
    score,
    slopes_text,
)
from study.claims.verdict import (
    ALPHA,
    Evidence,
    NotTested,
    Verdict,
    claim,
    decided,
    judged,
)
from study.measurements.curvature import TOP
from study.measurements.kind import Column

TOO_FEW = "fewer than three trainings hold what it takes"
LogRatios = dict[str, list[float]]  # by training


@claim(
    "sharpness",
    "Flatter minima quantize better",
    figure="error_against_curvature",
    source="section 6.2, appendix G",
    needs="curvature of the checkpoints of three trainings or more",
)
def over_checkpoints(evidence: Evidence) -> list[Verdict]:
    """Correlate error and each measure of curvature over all checkpoints."""
    return _by_measure(_correlated, evidence)


def _by_measure(judge: Callable[[Evidence, Column], Verdict], evidence: Evidence) -> list[Verdict]:
    """Return a verdict on the error and each measure of curvature."""
    return [
        judged(f"{column.title} and KL divergence", judge, evidence, column)
        for column in _planned(evidence)
    ]


def _planned(evidence: Evidence) -> list[Column]:
    """Return the measures of curvature that the study plans."""
    settings = evidence.study.curvature
    has_top = settings is None or settings.lambda_max
    return [column for column in MEASURES if column != TOP or has_top]


def _correlated(evidence: Evidence, column: Column) -> Verdict:
    study = evidence.study
    points = checkpoints(study, evidence.rows, divergence_of(study), loss_of(study), column.name)
    correlation = given_loss_and_tokens(study, points, column.name)
    if correlation is None:
        raise NotTested(TOO_FEW)
    words = (
        f"Spearman's partial correlation given loss and tokens {correlation}, p"
        f" {correlation.p_value:.2g} (jackknife over trainings,"
        f" {correlation.checkpoints} checkpoints)"
    )
    return _judged_by(correlation.value, correlation.p_value, f"{correlation}", words)


def _judged_by(value: float, p_value: float, effect: str, words: str) -> Verdict:
    """Return the verdict on one value over trainings that is claimed to be above 0."""
    is_significant = p_value <= ALPHA
    outcome = decided(is_significant and value > 0, is_significant, 1)
    return Verdict(outcome, words, effect, p_value, holds_seeds=True)


@claim(
    "sharpening",
    "Curvature and error rise in the decay",
    figure="curvature",
    source="section 6.2, appendix G",
    needs="curvature of annealed weights and of their controls, of three trainings or more",
)
def in_the_decay(evidence: Evidence) -> list[Verdict]:
    """Compare curvature and error of annealed weights with their controls at equal tokens."""
    return _by_measure(_risen, evidence)


def _risen(evidence: Evidence, column: Column) -> Verdict:
    """Judge both ratios; a trajectory without a control is compared with itself before the decay.

    Supported and contradicted take both to be significant: the larger p-value decides (Berger 1982,
    intersection-union test).
    """
    curvatures, divergences = LogRatios(), LogRatios()
    has_controls = bool(evidence.study.controls)
    for end in evidence.annealed:
        # Equal tokens where there is a control: then the anneal alone makes the difference.
        reference = end.control if has_controls else end.first
        sharper = log_ratio(end.last, reference, column.name)
        worse = log_ratio(end.last, reference, divergence_of(evidence.study))
        # Both ratios are over the same ends, or the two tests would be of different runs.
        if sharper is not None and worse is not None:
            training = training_of(evidence.study, end.run)
            curvatures.setdefault(training, []).append(sharper)
            divergences.setdefault(training, []).append(worse)
    curvature, divergence = mean_ratio(curvatures), mean_ratio(divergences)
    if curvature is None or divergence is None:
        raise NotTested(TOO_FEW)
    p_value = max(curvature.p_value, divergence.p_value)
    effect = f"{column.title} {curvature}, KL divergence {divergence}, p {p_value:.2g}"
    against = "the control at equal tokens"
    if not has_controls:
        against = "the weights before the decay, so that what the tokens since then did is in it"
    words = (
        f"against {against}: {effect}; geometric means over {divergence.trainings} trainings with"
        " 95% intervals, p of the weaker of the two"
    )
    # Both ratios above 1 support the claim: the smaller of them decides its direction.
    least = min(curvature.value, divergence.value)
    return _judged_by(math.log(least), p_value, effect, words)


@claim(
    "flat-averages",
    "Averages are flatter, better at equal loss",
    figure="averages",
    source="section 5, figure 4",
    needs="averages, with their curvature (curvature.averages), of three trainings or more",
)
def of_averages(evidence: Evidence) -> list[Verdict]:
    """Compare averages with weights: curvature at the same step, error at equal loss."""
    averages = averaged(evidence.study, evidence.rows)
    kinds = list(dict.fromkeys(average.kind for average in averages))
    verdicts = []
    for kind in kinds:
        of_kind = [average for average in averages if average.kind == kind]
        for column in _planned(evidence):
            judge = partial(_lower, of_kind, partial(_beside_weights, column))
            verdicts.append(judged(f"{column.title}, {kind} against weights of its step", judge))
        judge = partial(_lower, of_kind, partial(at_equal_loss, evidence.study))
        verdicts.append(judged(f"KL divergence, {kind} against weights at its loss", judge))
    return verdicts


def _beside_weights(column: Column, average: Averaged) -> float | None:
    return log_ratio(average.row, average.weights, column.name)


def _lower(averages: list[Averaged], log_ratio_of: Callable[[Averaged], float | None]) -> Verdict:
    """Judge whether the figure of averages is lower: its ratio to that of weights is below 1."""
    by_training = LogRatios()
    for average in averages:
        value = log_ratio_of(average)
        if value is not None:
            by_training.setdefault(average.training, []).append(value)
    ratio = mean_ratio(by_training)
    if ratio is None:
        raise NotTested(TOO_FEW)
    effect = f"{ratio}, p {ratio.p_value:.2g}"
    words = (
        f"{effect}; geometric mean over {ratio.trainings} trainings and"
        f" {sum(map(len, by_training.values()))} averages of them before the anneal"
    )
    # Lower is claimed, and `_judged_by` takes what is claimed to be above 0.
    return _judged_by(-math.log(ratio.value), ratio.p_value, effect, words)


@claim(
    "formula",
    "Curvature, bits and rate predict the error",
    figure="formula",
    source="future work of section 7; our formula (dynamics/mechanism/formula.py)",
    needs="curvature of the checkpoints of four trainings or more, of two settings or more",
)
def by_formula(evidence: Evidence) -> list[Verdict]:
    """Judge the formula with fitted slopes, and with those of the second-order theory."""
    observations = observe(evidence.study, evidence.rows)
    if observations is None:
        return [Verdict("not tested", "fewer than four trainings of two settings hold curvature")]
    lines = {"slopes by least squares": "formula", "slopes of the theory": "theory"}
    return [
        _formula(observations, MODELS[name])._replace(measure=line) for line, name in lines.items()
    ]


def _formula(observations: Observations, model: LogLinear) -> Verdict:
    """Judge whether errors of held-out trainings are smaller than those of every baseline.

    The largest p-value decides (Berger 1982, intersection-union test).
    """
    by_model, ratios = errors(observations, model), dict[str, Ratio]()
    for name in BASELINES:
        other = errors(observations, MODELS[name])
        ratio = mean_ratio(
            # A difference of mean |log| errors: above 0 where the baseline is farther off.
            {training: [other[training] - by_model[training]] for training in by_model}
        )
        assert ratio, "there are four trainings or more"
        ratios[name] = ratio
    # A baseline that predicts better comes first, then the one of the largest p-value.
    nearest = max(ratios, key=lambda name: (ratios[name].value < 1, ratios[name].p_value))
    weakest = ratios[nearest]
    scored = score(observations, model)
    factors = {name: score(observations, MODELS[name]).median_factor for name in BASELINES}
    effect = f"median factor {scored.median_factor:.3g}, {factors[nearest]:.3g} by {nearest}"
    others = ", ".join(f"{factor:.3g} by {name}" for name, factor in factors.items())
    words = (
        f"KL divergence of held-out trainings is off by a median factor {scored.median_factor:.3g},"
        f" {others}; p {weakest.p_value:.2g} of the comparison with {nearest}; R squared"
        f" {scored.r_squared:.2f}; by all trainings {slopes_text(observations)}, theory 1, 1 and 0"
    )
    return _judged_by(math.log(weakest.value), weakest.p_value, effect, words)
