"""Averages of checkpoints that emulate a decay of the learning rate.

Weights are the first checkpoint plus all updates since, so an average weighs updates, too:

    sum_j c_j theta_j = theta_0 + sum_i w_i (theta_i - theta_(i-1)),  w_i = c_i + ... + c_k,

for checkpoints 0 to k and coefficients with sum 1. With updates as they were, w_i is a factor of
their learning rate, and a decay w fixes the coefficients: c_0 = 1 - w_1, c_i = w_i - w_(i+1) and
c_k = w_k. This is the theorem of WSM (arXiv 2507.17634). The w_i that are taken here, for steps at
any distances, are ours.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from train.run.optimization import Shape, share_left


def decay_coefficients(steps: Sequence[int], shape: Shape) -> tuple[float, ...]:
    """Return coefficients of checkpoints, by which their updates have the rates of an anneal.

    The anneal starts at the first step and ends at the last one, at zero, as one of a run does
    (`train.run.schedules`). An average weighs all updates between two checkpoints alike. So each
    has the mean of the shares that the anneal's rates have there. With a checkpoint at every step,
    or equal updates between them, this is exact.

    Args:
        steps: of the checkpoints, two or more, rising.
        shape: of the decay.

    Returns:
        One per checkpoint, none below 0, with sum 1.

    Example: intervals of ten steps, then the first two of them as one.
        >>> [round(each, 3) for each in decay_coefficients((0, 10, 20, 30), "linear")]
        [0.183, 0.333, 0.333, 0.15]
        >>> [round(each, 3) for each in decay_coefficients((0, 20, 30), "linear")]
        [0.35, 0.5, 0.15]
    """
    first, last = steps[0], steps[-1]
    shares = [
        fmean(share_left(shape, (step - first) / (last - first)) for step in _updates(*interval))
        for interval in pairwise(steps)
    ]
    # before the first checkpoint all of the rate is left, after the last one nothing
    return tuple(before - after for before, after in pairwise((1.0, *shares, 0.0)))


def _updates(start: int, stop: int) -> range:
    """Return the updates between two checkpoints by number."""
    return range(start + 1, stop + 1)


def describe_decay(steps: Sequence[int], shape: Shape) -> str:
    """Return the average in words.

    Example:
        >>> describe_decay((560, 592, 640), "sqrt")
        'decay-equivalent average (sqrt) of steps 560, 592 and 640'
    """
    *before, last = map(str, steps)
    return f"decay-equivalent average ({shape}) of steps {', '.join(before)} and {last}"
