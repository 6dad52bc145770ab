"""The parts of a measurement: products, gradients and vectors over all parameters of each."""

import math
from typing import NamedTuple

from curvature.settings import CurvatureSettings, HutchinsonSettings, LanczosSettings

# At theta, and on both sides of it for a trial step and the one that it suggests.
GRADIENTS_OF_GUARD = 5
GUARD_VECTORS = 1  # theta, to put the parameters back


class Part(NamedTuple):
    """One part of a measurement.

    Attributes:
        products: Hessian products, of a microbatch each.
        gradients: of a microbatch each.
        vectors: over all parameters, that it holds at once, at most.
        together: microbatches that ranks with whole models share out at once, each a whole one.
        at_most: True for a part that may stop before.
    """

    name: str
    products: int
    gradients: int
    vectors: int
    together: int
    at_most: bool = False


def parts_of(settings: CurvatureSettings) -> list[Part]:
    """Return all parts of a measurement, the guard first."""
    parts = [Part("guard", 1, GRADIENTS_OF_GUARD, GUARD_VECTORS, 1)]
    microbatches = math.ceil(settings.fixed_sequences / settings.microbatch_sequences)
    if isinstance(settings, HutchinsonSettings):
        companions = settings.companion_pairs
        parts += [
            Part("trace", settings.pairs, 0, 0, settings.pairs),
            Part("norm traces", settings.norm_pairs, 0, 0, settings.norm_pairs),
            Part("Gauss-Newton and Fisher traces", 0, 2 * companions, 0, companions),
        ]
        return [*parts, _eigenvalues(settings, microbatches, 1)] if settings.lambda_max else parts
    products = settings.starts * settings.steps * microbatches
    parts.append(Part("density", products, 0, settings.steps + 4, microbatches))
    ends = settings.largest + settings.smallest
    return [*parts, _eigenvalues(settings, microbatches, ends)]


def _eigenvalues(
    settings: HutchinsonSettings | LanczosSettings, microbatches: int, ends: int
) -> Part:
    products = (settings.max_iterations + ends) * microbatches
    # The basis, the start, a pair that is judged, and three of its product; the top pair is kept.
    vectors = settings.max_iterations + (5 if ends == 1 else 6)
    return Part("eigenvalues", products, 0, vectors, microbatches, at_most=True)
