"""The correlation of error and curvature with what both depend on held fixed."""

from collections.abc import Sequence

import numpy as np

from dynamics.mechanism.checkpoints import Checkpoint, divergence_of, loss_of
from dynamics.mechanism.correlation import Correlation, partial_correlation
from study.definition import Study


def given_loss_and_tokens(
    study: Study, points: Sequence[Checkpoint], column: str
) -> Correlation | None:
    """Return the partial rank correlation of a measure of curvature and of the KL divergence.

    Both grow as training continues and the loss falls; at equal loss and equal tokens, what is left
    is what the settings of the trainings and the phase of the schedule make of them. None where it
    is not known.
    """

    def values(name: str) -> list[float]:
        return [float(point.row[name]) for point in points]

    return partial_correlation(
        np.array(values(column)),
        np.array(values(divergence_of(study))),
        np.column_stack([values(loss_of(study)), values("tokens")]),
        [point.training for point in points],
    )
