"""The trace of the Hessian, whole, by block and by tensor, from random probes, one microbatch each (Hutchinson 1990).

For v with independent entries of mean 0 and variance 1, E[v'Hv] = tr H, and E[v_t'(Hv)_t] = tr H_tt for every tensor
t: the traces of all tensors come with the same products. With signs (Rademacher) the variance is least among such v,
2 (|H|_F^2 - sum h_ii^2) for a fixed H (Avron and Toledo 2011).

Microbatches and probes are drawn together, so the spread of the values holds the noise of both. What several probes
say of one microbatch is not independent: their mean is one value, and all errors are those of a mean over microbatches.

Shapes: M microbatches, K probes of a microbatch.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from train.command import UserError

# Products are asked for, and the stopping rule is applied, after every 16 microbatches, whatever the number of ranks.
ROUND_MICROBATCHES = 16
# A rule that stops where the standard error looks small stops too often where it is so by chance, the more so the fewer
# microbatches it rests on and the more mean and variance of the values are correlated. Of 95% intervals of values with
# a skewness of -1 (tests/curvature/trace/test_coverage.py) 91.3% covered at the worst target with a minimum of 16
# microbatches, 92.4% with 32 and 93.3% with 64; of normal values 94.1%, 94.1% and 94.4%.
MINIMUM_TO_STOP = 64


class Quadratic(NamedTuple):
    """What one product with a vector v on one microbatch yields.

    Attributes:
        loss: mean over the tokens, nats per token.
        slope: g.v with the gradient g of that loss.
        dots: v_t'(Hv)_t of every parameter tensor t by name; their sum is v'Hv.
    """

    loss: float
    slope: float
    dots: dict[str, float]


class Estimate(NamedTuple):
    """A mean over microbatches, its standard error s / sqrt(M), and its Student-t interval with M - 1 degrees."""

    mean: float
    standard_error: float
    interval: tuple[float, float]


class TraceEstimate(NamedTuple):
    """Traces in nats per token per squared unit of the parameters, and the loss over the same microbatches.

    Attributes:
        total: of the whole Hessian of the mean loss.
        blocks: of its diagonal blocks, by the block's name.
        tensors: of the diagonal block of every parameter tensor.
        loss: nats per token.
        per_microbatch: v'Hv of every microbatch, the mean over its probes; `total` is the mean of these. Two
            checkpoints measured on the same microbatches with the same probes are compared value by value.
        blocks_per_microbatch: the same for every block.
        microbatches: M.
        probes: M K.
        reached: whether the relative error asked for was reached; None if none was.
    """

    total: Estimate
    blocks: dict[str, Estimate]
    tensors: dict[str, Estimate]
    loss: Estimate
    per_microbatch: list[float]
    blocks_per_microbatch: dict[str, list[float]]
    microbatches: int
    probes: int
    reached: bool | None


def estimate_mean(values: Sequence[float] | NDArray[np.float64], *, level: float) -> Estimate:
    """Mean, standard error and interval of independent values, two or more.

    The interval is mean -+ t s / sqrt(n), t the quantile (1 + level) / 2 of Student's distribution with n - 1 degrees.
    """
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    standard_error = math.sqrt(variance / len(values))
    half = float(stdtrit(len(values) - 1, (1 + level) / 2)) * standard_error
    return Estimate(mean, standard_error, (mean - half, mean + half))


def check_pairs(pairs: int, probes_per_microbatch: int, relative_error: float | None) -> None:
    """UserError if the pairs are none, no whole microbatches, or too few to tell an error."""
    least = 2 if relative_error is None else MINIMUM_TO_STOP
    if pairs < 1 or probes_per_microbatch < 1:
        raise UserError(
            f"{pairs} pairs with {probes_per_microbatch} probes per microbatch; ask for one or more of both"
        )
    if pairs % probes_per_microbatch:
        raise UserError(
            f"{pairs} pairs are not whole microbatches of {probes_per_microbatch} probes; "
            f"ask for {math.ceil(pairs / probes_per_microbatch) * probes_per_microbatch}"
        )
    if pairs < least * probes_per_microbatch:
        reason = "an error" if relative_error is None else "a relative error"
        raise UserError(
            f"{reason} is told from {least} microbatches or more, {pairs} pairs with {probes_per_microbatch} probes "
            f"each are {pairs // probes_per_microbatch}; ask for {least * probes_per_microbatch} pairs or more"
        )


def _checked(quadratics: list[Quadratic], indices: range) -> list[Quadratic]:
    assert len(quadratics) == len(indices), "evaluate returns one Quadratic per pair, in their order"
    for index, quadratic in zip(indices, quadratics, strict=True):
        if not all(map(math.isfinite, (quadratic.loss, quadratic.slope, *quadratic.dots.values()))):
            raise UserError(
                f"pair {index}: loss {quadratic.loss} or its derivatives are not finite; give a checkpoint that is"
            )
    return quadratics


def _by_microbatch(values: Sequence[float], probes_per_microbatch: int) -> list[float]:
    values_MK = np.asarray(values, dtype=np.float64).reshape(-1, probes_per_microbatch)
    means: list[float] = values_MK.mean(axis=1).tolist()
    return means


def _is_reached(pairs: list[Quadratic], probes: int, relative_error: float) -> bool:
    total = _by_microbatch([math.fsum(pair.dots.values()) for pair in pairs], probes)
    if len(total) < MINIMUM_TO_STOP:
        return False
    estimate = estimate_mean(total, level=0.95)  # of which only mean and error enter
    return estimate.standard_error <= relative_error * abs(estimate.mean)


def _summary(
    pairs: list[Quadratic], probes: int, block_of: Callable[[str], str], level: float, reached: bool | None
) -> TraceEstimate:
    tensors = {name: _by_microbatch([pair.dots[name] for pair in pairs], probes) for name in pairs[0].dots}
    members: dict[str, list[str]] = {}
    for name in tensors:
        members.setdefault(block_of(name), []).append(name)
    blocks = {
        block: [math.fsum(values) for values in zip(*(tensors[name] for name in names), strict=True)]
        for block, names in members.items()
    }
    total = [math.fsum(values) for values in zip(*tensors.values(), strict=True)]
    return TraceEstimate(
        total=estimate_mean(total, level=level),
        blocks={block: estimate_mean(values, level=level) for block, values in blocks.items()},
        tensors={name: estimate_mean(values, level=level) for name, values in tensors.items()},
        loss=estimate_mean(_by_microbatch([pair.loss for pair in pairs], probes), level=level),
        per_microbatch=total,
        blocks_per_microbatch=blocks,
        microbatches=len(total),
        probes=len(pairs),
        reached=reached,
    )


def estimate_trace(
    evaluate: Callable[[range], list[Quadratic]],
    *,
    pairs: int,
    probes_per_microbatch: int,
    relative_error: float | None,
    block_of: Callable[[str], str],
    level: float = 0.95,
) -> TraceEstimate:
    """Asks for all pairs at once or, with a relative error, round by round until it is reached or there are no more.

    Pair i is microbatch i // probes_per_microbatch with probe i. The rounds are a function of `probes_per_microbatch`
    alone, so the pairs that enter the estimate do not depend on the number of ranks.

    Args:
        evaluate: the products of the pairs of a range, in their order; on every rank all of them.
        pairs: the most pairs, and without `relative_error` their number.
        probes_per_microbatch: K.
        relative_error: stop once standard error / |mean| of the total is no more, and at least 64 microbatches are in.
        block_of: the block in which a tensor is counted.
        level: coverage of the intervals.

    Raises:
        UserError: the pairs are none, no whole microbatches or too few to tell an error, or a value is not finite.
    """
    check_pairs(pairs, probes_per_microbatch, relative_error)
    size = pairs if relative_error is None else ROUND_MICROBATCHES * probes_per_microbatch
    done: list[Quadratic] = []
    reached: bool | None = None
    for start in range(0, pairs, size):
        indices = range(start, min(start + size, pairs))
        done += _checked(evaluate(indices), indices)
        reached = None if relative_error is None else _is_reached(done, probes_per_microbatch, relative_error)
        if reached:
            break
    return _summary(done, probes_per_microbatch, block_of, level, reached)
