"""Results of products with the Hessian of the mean loss of a microbatch.

Shapes: p parameters of this rank, s entries of a picture.
"""

from typing import NamedTuple

from torch import Tensor


class Quadratic(NamedTuple):
    """The loss and its first two derivatives along a vector v, on one microbatch.

    Attributes:
        loss: mean over the tokens, nats per token.
        slope: g.v with the gradient g of that loss.
        dots: v_t'(Hv)_t of every parameter tensor t by name; their sum is v'Hv.
    """

    loss: float
    slope: float
    dots: dict[str, float]


class HessianProduct(NamedTuple):
    """The loss, g.v and this rank's part of Hv."""

    loss: float
    slope: float
    hv_p: Tensor


class SketchedProduct(NamedTuple):
    """The loss, g.v and a picture of Hv (curvature/products/sketch.py)."""

    loss: float
    slope: float
    picture_s: Tensor
