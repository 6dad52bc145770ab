"""The power law of an error in the size of the model and in its tokens per parameter.

log e = c + a log N + b log(D / N), by least squares over points: one for each number of parameters
N and of tokens D. Runs of the same N and D differ in learning rate, engine or seed, and their
geometric mean is one point: what they share, such as a misfit of the law, is not a replicate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from base.errors import UserError
from quant_eval.estimate import Estimate, Source

FEWEST_SIZES = 3
SAME = 1e-6  # relative; tokens per parameter that differ by less are one value
SCATTER = "scatter of the points"
PARAMETERS, PER_PARAMETER = "N", "D/N"


class Point(NamedTuple):
    """An error at a size and a budget.

    Attributes:
        parameters: N.
        tokens: D.
        error: above 0.
    """

    parameters: float
    tokens: float
    error: float


@dataclass(frozen=True)
class PowerLaw:
    """A fitted power law.

    Attributes:
        exponents: of N, and of D/N where the points differ in it.
        scale: the error at the geometric means of N and D/N.
        means: those geometric means.
        points: how many it is fitted to.
    """

    exponents: Mapping[str, Estimate]
    scale: float
    means: Mapping[str, float]
    points: int

    def at(self, parameters: float) -> float:
        """Return the error at a size, at the mean tokens per parameter."""
        distance = math.log(parameters / self.means[PARAMETERS])
        return self.scale * math.exp(self.exponents[PARAMETERS].value * distance)


def merged(points: Sequence[Point]) -> list[Point]:
    """Return a point per size and budget, the geometric mean of those that share both.

    Example:
        >>> merged([Point(1e6, 2e7, 0.1), Point(1e6, 2e7, 0.4)])[0].error
        0.2
    """
    places: dict[tuple[float, float], list[float]] = {}
    for point in points:
        if point.error <= 0:
            raise UserError(
                f"an error at {point.parameters:.3g} parameters is {point.error:.3g}, which has no"
                " logarithm; measure it on more text"
            )
        places.setdefault((point.parameters, point.tokens), []).append(math.log(point.error))
    return [Point(*place, math.exp(float(np.mean(logs)))) for place, logs in places.items()]


def fit(points: Sequence[Point]) -> PowerLaw:
    """Return the power law of these points, with standard errors by Student's t.

    Raises:
        UserError: fewer than `FEWEST_SIZES` sizes, no more points than coefficients, sizes and
            tokens per parameter that vary together, or an error that is not positive.

    Example: points on N^-0.5, of 20 tokens per parameter each.
        >>> law = fit([Point(size, 20 * size, size**-0.5) for size in (1e6, 4e6, 16e6)])
        >>> round(law.exponents["N"].value, 4), round(law.at(1e8), 6)
        (-0.5, 0.0001)
    """
    points = merged(points)
    sizes = {point.parameters for point in points}
    if len(sizes) < FEWEST_SIZES:
        raise UserError(
            f"{len(sizes)} of {FEWEST_SIZES} sizes that decide an exponent; give studies of more"
        )

    # log error = constant + exponents x centred logs; a quantity that all share has no exponent
    logs = {
        PARAMETERS: np.log([point.parameters for point in points]),
        PER_PARAMETER: np.log([point.tokens / point.parameters for point in points]),
    }
    means = {name: math.exp(values.mean()) for name, values in logs.items()}
    varied = {
        name: values - values.mean() for name, values in logs.items() if np.ptp(values) > SAME
    }
    design = np.stack([np.ones(len(points)), *varied.values()], axis=1)

    # what the points cannot decide is refused
    degrees = len(points) - design.shape[1]
    if np.linalg.matrix_rank(design, tol=SAME) < design.shape[1]:
        raise UserError(
            "sizes and tokens per parameter vary together, so neither exponent is decided; add a"
            " study of another budget"
        )
    if degrees < 1:
        raise UserError(
            f"{len(points)} sizes and budgets decide no exponents of N and D/N with an error; add a"
            " study"
        )

    # least squares, and standard errors from the residuals
    target = np.log([point.error for point in points])
    coefficients, *_ = np.linalg.lstsq(design, target)
    variance = float(((target - design @ coefficients) ** 2).sum()) / degrees
    errors = np.sqrt(variance * np.diag(np.linalg.inv(design.T @ design)))
    exponents = {
        name: Estimate(float(value), {SCATTER: Source(float(error), degrees)})
        for name, value, error in zip(varied, coefficients[1:], errors[1:], strict=True)
    }
    return PowerLaw(exponents, math.exp(coefficients[0]), means, len(points))
