"""The order in which the inputs of a linear are rounded; `gptq.prepare` asks for it.

Shapes: I input features, G groups of K features.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from base.rounding.spec import RoundingSpec


def order_of(diagonal_I: Tensor, spec: RoundingSpec) -> Tensor:
    """Return the input features as they are rounded, int64 [I], from diag(H); see `prepare`.

    Example: `groupaware` rounds whole groups, here of two features.
        >>> from types import SimpleNamespace as Spec
        >>> diagonal_I, settings = torch.tensor([1.0, 3.0, 4.0, 2.0]), {"kept": None}
        >>> order_of(diagonal_I, Spec(order="actorder", **settings)).tolist()
        [2, 1, 3, 0]
        >>> order_of(diagonal_I, Spec(order="groupaware", group_size=2, **settings)).tolist()
        [2, 3, 1, 0]
    """
    if spec.order == "actorder":
        return diagonal_I.argsort(descending=True, stable=True)
    if spec.kept is not None:
        return _kept_last(diagonal_I, num_kept(spec, len(diagonal_I)))
    natural_I = torch.arange(len(diagonal_I), device=diagonal_I.device)
    if spec.order in ("natural", None):
        return natural_I
    assert spec.group_size is not None
    diagonal_GK = diagonal_I.view(-1, spec.group_size)
    within_GK = natural_I.view_as(diagonal_GK).gather(
        1, diagonal_GK.argsort(dim=1, descending=True, stable=True)
    )
    return within_GK[diagonal_GK.amax(1).argsort(descending=True, stable=True)].flatten()


def num_kept(spec: RoundingSpec, width: int) -> int:
    """Return how many of `width` inputs Atom and QUIK keep: their share, rounded up to groups.

    Example:
        >>> from types import SimpleNamespace as Spec
        >>> num_kept(Spec(kept=0.03, group_size=128), 4096)
        128
    """
    assert spec.kept is not None
    size = spec.group_size or 1
    share = Fraction(str(spec.kept))  # the exact decimal: 0.07 of 100 inputs are 7
    return math.ceil(share * width / size) * size


def _kept_last(diagonal_I: Tensor, count: int) -> Tensor:
    """Return the features in natural order, but the `count` with the largest H_ii last."""
    is_kept_I = torch.zeros_like(diagonal_I, dtype=torch.bool)
    is_kept_I[diagonal_I.argsort(descending=True, stable=True)[:count]] = True
    return is_kept_I.int().argsort(stable=True)
