"""The parts of a measurement: products, gradients and the vectors over all parameters that each holds."""

import math
from typing import NamedTuple

from curvature.settings import (
    CurvatureSettings,
    FixedTraceSettings,
    HutchinsonSettings,
    LanczosSettings,
    PowerSettings,
)
from curvature.trace.hutchinson import ROUND_MICROBATCHES

GRADIENTS_PER_DIFFERENCE = 5  # at theta, and on both sides of it for a trial step and the one it suggests
GUARD_VECTORS = 1  # theta, to put the parameters back
OF_A_DIFFERENCE = 3  # theta, the gradient there, and a difference


class Part(NamedTuple):
    """One part of a measurement.

    Attributes:
        products: Hessian products, of a microbatch each.
        gradients: of a microbatch each.
        vectors: over all parameters, that it holds at once, at most.
        together: microbatches that ranks with whole models share out at once, each a whole one.
        at_most: whether it may stop before.
        sums: of vectors over ranks with whole models.
    """

    name: str
    products: int
    gradients: int
    vectors: int
    together: int
    at_most: bool = False
    sums: int = 0


def parts_of(settings: CurvatureSettings) -> list[Part]:
    """All parts of a measurement, the guard first."""
    parts = [Part("guard", 1, GRADIENTS_PER_DIFFERENCE, GUARD_VECTORS, 1)]
    if isinstance(settings, HutchinsonSettings):
        parts += _from_pairs(settings)
    elif isinstance(settings, FixedTraceSettings):
        sketched = settings.products // (3 if settings.name == "hutch++" else 2)
        parts.append(_on_fixed_batch(settings, "trace", settings.products, sketched + 5))
    elif isinstance(settings, LanczosSettings):
        parts.append(_on_fixed_batch(settings, "density", settings.starts * settings.steps, settings.steps + 4))
    else:
        parts.append(_on_fixed_batch(settings, "trace", settings.probes, 3))
    if isinstance(settings, PowerSettings):
        parts.append(_on_fixed_batch(settings, "lambda_max", settings.max_iterations, 6, at_most=True))
    elif settings.has_eigenvalues:
        ends = settings.largest + settings.smallest if isinstance(settings, LanczosSettings) else 1
        steps = settings.max_iterations
        vectors = steps + (5 if ends == 1 else 6)  # the start, one that is judged, and three of its product
        parts.append(_on_fixed_batch(settings, "eigenvalues", steps + ends, vectors, at_most=True))
    return parts


def _from_pairs(settings: HutchinsonSettings) -> list[Part]:
    stops = settings.relative_error is not None
    at_once = ROUND_MICROBATCHES * settings.probes_per_microbatch if stops else settings.pairs
    held = 0 if settings.route == "dual" else 1
    return [
        Part("trace", settings.pairs, 0, held, at_once, stops),
        Part("norm traces", settings.norm_pairs, 0, held, settings.norm_pairs),
        Part("Gauss-Newton and Fisher traces", 0, 2 * settings.companion_pairs, 0, settings.companion_pairs),
    ]


def _on_fixed_batch(
    settings: CurvatureSettings, name: str, products: int, vectors: int, *, at_most: bool = False
) -> Part:
    """`products` with the mean Hessian of the fixed batch."""
    microbatches = math.ceil(settings.fixed_sequences / settings.microbatch_sequences)
    held = vectors + (0 if settings.route == "dual" else OF_A_DIFFERENCE)
    return Part(name, products * microbatches, 0, held, microbatches, at_most, sums=products)
