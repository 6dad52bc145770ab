"""A claim on what predicts the error: outliers of weights and inputs do not, R_L does.

R_L is the relative squared error of the output of the last block in the quantized model. It is
measured on the quantized model, so nothing but the final norm and the head are between it and the
error: it is near to a definition of the error, and that it predicts it says little of a mechanism.
What decides the claim is that outliers, known without quantizing, predict it less.
"""

from collections.abc import Sequence

import numpy as np

from dynamics.mechanism.checkpoints import CheckpointRow, checkpoints
from dynamics.mechanism.correlation import Advantage, advantage
from study.claims.verdict import (
    ALPHA,
    Evidence,
    Measure,
    NotTested,
    Verdict,
    claim,
    decided,
    judged,
    measures,
)
from study.definition import Study
from study.measurements.kind import Column
from study.measurements.outliers import INPUT, WEIGHT
from study.measurements.quantization import DIVERGENCE, R_L
from study.results.table import figure_columns

OUTLIERS = tuple(
    of[statistic] for statistic in ("kurtosis", "max_to_mean") for of in (WEIGHT, INPUT)
)
CIRCULAR = "R_L is measured on the quantized model, and is near to a definition of its error"


def measures_outliers(study: Study) -> bool:
    """Return whether a study measures outliers of weights and inputs."""
    return figure_columns(study).keys() >= {column.name for column in OUTLIERS}


@claim(
    "outliers",
    "R_L predicts the error, outliers do not",
    figure="outliers",
    source="arXiv 2509.23500, abstract, over optimizers",
    needs="outliers and R_L of three trainings or more, such as seeds or optimizers",
    concerns=measures_outliers,
)
def outliers(evidence: Evidence) -> list[Verdict]:
    """Compare rank correlations with the error: that of R_L with those of four outlier statistics.

    Over the ends of training, and within trainings over their checkpoints. An outlier statistic
    that correlates with the error more than R_L does contradicts it.
    """
    study, rows = evidence.study, evidence.rows
    columns = (DIVERGENCE, R_L, *OUTLIERS)
    verdicts = []
    for measure in measures(evidence, study.quantization.specs, (DIVERGENCE,)):
        names = [column.of(measure.spec) for column in columns]
        along = checkpoints(study, rows, *names)
        last = {(end.run.name, end.run.total_steps) for end in evidence.ends}
        ends = [point for point in along if (point.row["run"], point.row["step"]) in last]
        verdicts += [
            judged(f"{measure.title}, over ends of training", _better, measure, ends, False),
            judged(f"{measure.title}, within trainings", _better, measure, along, True),
        ]
    return verdicts


def _better(measure: Measure, points: Sequence[CheckpointRow], within: bool) -> Verdict:
    """Judge whether R_L correlates more than every statistic.

    Supported takes all: the largest p-value decides (Berger 1982, intersection-union test). One
    that correlates more refutes it: the smallest p-value of those, times their number (Bonferroni).
    """
    # A title ends with what a further column holds.
    titles = {column: column.title.partition(";")[0] for column in OUTLIERS}
    advantages = {titles[column]: _over(measure, points, column, within) for column in OUTLIERS}
    above = {title: better for title, better in advantages.items() if better.value < 0}
    if above:
        name = min(above, key=lambda title: above[title].p_value)
        p_value = min(1.0, len(advantages) * above[name].p_value)
    else:
        name = max(advantages, key=lambda title: advantages[title].p_value)
        p_value = advantages[name].p_value
    each = "; ".join(
        f"{title} {better}, p {better.p_value:.2g}" for title, better in advantages.items()
    )
    deciding = advantages[name]
    words = (
        f"Spearman's correlations with the error over {deciding.trainings} trainings and"
        f" {deciding.checkpoints} checkpoints (jackknife over trainings), R_L against {each};"
        f" {name} decides. {CIRCULAR}"
    )
    is_significant = p_value <= ALPHA
    return Verdict(
        decided(is_significant and not above, is_significant, 1),
        words,
        f"R_L {deciding} ({name})",
        p_value,
        f"{len(advantages) - len(above)} of {len(advantages)} statistics below R_L",
        CIRCULAR,
        holds_seeds=True,
    )


def _over(
    measure: Measure, points: Sequence[CheckpointRow], column: Column, within: bool
) -> Advantage:
    """Return how much more R_L correlates with the error than an outlier statistic.

    Raises:
        NotTested: there is no such comparison.
    """
    error_N, r_l_N, statistic_N = (
        np.array([point.row[each.of(measure.spec)] for point in points], dtype=np.float64)
        for each in (measure.figure, R_L, column)
    )
    trainings = [point.training for point in points]
    better = advantage(error_N, r_l_N, statistic_N, trainings, within=within)
    if better is None:
        raise NotTested(
            f"fewer than three trainings hold error, R_L and {column.title}, or their ranks are the"
            " same whichever training is left out"
        )
    return better
