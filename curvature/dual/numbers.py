"""Dual numbers over tensors: operations on values and their derivatives along one direction.

A dual number is x + eps x_dot with eps^2 = 0 (Clifford 1873); carried through a loss with the
parameters' x_dot = v it yields the loss L and its directional derivative g.v. The derivative of g.v
by the parameters is the Hessian-vector product Hv (Pearlmutter 1994, 'Fast exact multiplication by
the Hessian'). All rules are ordinary differentiable torch code, so that second step is first-order
reverse mode.

Why not torch.func.jvp(grad(loss)), or the gradient of g.v through the graph of g:
- Fast attention kernels have no second derivative; eager ones keep the S x S weights of every
  block. Here queries go through in chunks (`curvature.dual`, where norms, SwiGLU, attention and
  loss have their backward pass written out).
- The graph of g records the backward pass too: of 7 billion parameters at 4,096 tokens about 310
  GB by an estimate, against 63 GB here with checkpointing.
- jvp(grad) hands over all of Hv at the end. Here one weight comes after the other, so that
  v_t'(Hv)_t is taken and (Hv)_t dropped: a trace needs no vector at all.
- FSDP2's hooks and checkpointing are made for one forward and one backward pass, which this is.
The price is a second spelling of every architecture, which the guard holds against transformers'
own before anything is measured.

Products of matrices are computed in the precision of the weights; norms, activations, softmax and
losses in that precision too, but not below fp32. So float64 weights give float64 results, and bf16
ones what mixed precision means.

Shapes: I and O input and output features.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Dual(NamedTuple):
    """A value and its derivative along the direction of the product, of one shape.

    Example: the square of x = 3 along x_dot = 1.
        >>> x = Dual(torch.tensor(3.0), torch.tensor(1.0))
        >>> x * x
        Dual(value=tensor(9.), tangent=tensor(6.))
    """

    value: Tensor
    tangent: Tensor

    def map(self, linear_map: Callable[[Tensor], Tensor]) -> "Dual":
        """Apply a linear map, which acts on the value and on the tangent alike."""
        return Dual(linear_map(self.value), linear_map(self.tangent))

    def __add__(self, other: Self) -> "Dual":  # type: ignore[override]
        """Add the parts, where tuples would be joined."""
        return Dual(self.value + other.value, self.tangent + other.tangent)

    def __mul__(self, other: Self) -> "Dual":  # type: ignore[override]
        """Multiply entry by entry, where a tuple would be repeated."""
        return Dual(
            self.value * other.value, self.tangent * other.value + self.value * other.tangent
        )


def rematerialised(function: Callable[..., Any], *arguments: Any, **kwargs: Any) -> Any:
    """Call `function`, and again in the backward pass, for which its arguments alone are kept."""
    # Models are in eval mode: nothing is random, so no generator's state has to be kept.
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **kwargs)


def widened(x: Dual) -> Dual:
    """Return x in fp32, or in the precision it has if that is higher."""
    return x.map(lambda t: t.to(torch.promote_types(t.dtype, torch.float32)))


def linear(x: Dual, weight_OI: Dual) -> Dual:
    """Return y = x W' with y_dot = x_dot W' + x W_dot'.

    Args:
        x: [..., I].
        weight_OI: in whose precision the products are computed.

    Example: 1 x 3 + 2 x 4 = 11, and 1 x 3 + 2 x 1 = 5 along x_dot = (1, 0) and W_dot = (0, 1).
        >>> x = Dual(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0]]))
        >>> linear(x, Dual(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]])))
        Dual(value=tensor([[11.]]), tangent=tensor([[5.]]))
    """
    x = x.map(lambda t: t.to(weight_OI.value.dtype))
    rows = x.map(lambda t: t.flatten(0, -2))
    tangent = torch.addmm(rows.tangent @ weight_OI.value.T, rows.value, weight_OI.tangent.T)
    y = Dual(rows.value @ weight_OI.value.T, tangent)
    return y.map(lambda t: t.view(*x.value.shape[:-1], -1))


def normalised(x: Dual, epsilon: float) -> Dual:
    """Return x over the root mean square of its last axis: n = x r, r = (mean x^2 + eps)^(-1/2).

    n_dot = r (x_dot - n mean(n x_dot)).

    Example: (1, 7) has the root mean square 5.
        >>> n = normalised(Dual(torch.tensor([1.0, 7.0]), torch.tensor([5.0, 0.0])), epsilon=0.0)
        >>> [round(x, 4) for x in n.value.tolist()], [round(x, 4) for x in n.tangent.tolist()]
        ([0.2, 1.4], [0.98, -0.14])
    """
    x = widened(x)
    scale = torch.rsqrt(x.value.square().mean(-1, keepdim=True) + epsilon)
    normed = x.value * scale
    return Dual(normed, scale * (x.tangent - normed * (normed * x.tangent).mean(-1, keepdim=True)))


def centred(x: Dual) -> Dual:
    """Return x less the mean of its last axis."""
    return widened(x).map(lambda t: t - t.mean(-1, keepdim=True))


def standardised(x: Dual, epsilon: float) -> Dual:
    """Return x less its mean, normalised: a LayerNorm (Ba et al. 2016) without parameters."""
    return normalised(centred(x), epsilon)


def gelu(x: Dual) -> Dual:
    """Return the exact GELU x Phi(x), of slope Phi(x) + x phi(x) (Hendrycks and Gimpel 2016)."""
    x = widened(x)
    below = torch.special.ndtr(x.value)
    density = torch.exp(-0.5 * x.value.square()) / math.sqrt(2 * math.pi)
    return Dual(x.value * below, (below + x.value * density) * x.tangent)


def softplus(x: Dual) -> Dual:
    """Return log(1 + e^x), of slope sigmoid(x).

    Example:
        >>> softplus(Dual(torch.tensor(0.0), torch.tensor(1.0))).tangent.item()
        0.5
    """
    return Dual(F.softplus(x.value), torch.sigmoid(x.value) * x.tangent)


def xielu(x: Dual, alpha_p: Dual, alpha_n: Dual, beta: Tensor, epsilon: Tensor) -> Dual:
    """Return the xIELU of x (Huang and Schlag 2024, arXiv 2411.13010).

    It is a_p x^2 + beta x where x > 0, and a_n (e^x - 1 - x) + beta x elsewhere, with a_p =
    softplus(alpha_p), a_n = beta + softplus(alpha_n). As in transformers' code, x above epsilon < 0
    is epsilon in e^x. The second derivative jumps at 0; a point there has the
    derivatives of the branch that gives its value.

    Example: a_p = 1 and beta = 1/2 at 2 give 2^2 + 2/2, of slope 2 x 2 + 1/2.
        >>> unit = Dual(torch.tensor(math.log(math.e - 1)), torch.tensor(0.0))
        >>> x = Dual(torch.tensor(2.0), torch.tensor(1.0))
        >>> y = xielu(x, unit, unit, torch.tensor(0.5), torch.tensor(-1e-6))
        >>> round(float(y.value), 4), round(float(y.tangent), 4)
        (5.0, 4.5)
    """
    x, alpha_p, alpha_n = widened(x), widened(alpha_p), widened(alpha_n)
    exponent = x.value.clamp(max=epsilon)
    # Where the exponent is clamped e^x is a constant, whose slope is 0.
    bend = Dual(
        torch.expm1(exponent) - x.value, (torch.exp(exponent) * (x.value < epsilon) - 1) * x.tangent
    )
    above = softplus(alpha_p) * x * x
    scale = softplus(alpha_n)
    below = Dual(scale.value + beta, scale.tangent) * bend
    right = x.value > 0
    bent = Dual(
        torch.where(right, above.value, below.value),
        torch.where(right, above.tangent, below.tangent),
    )
    return bent + x.map(lambda t: beta * t)


def clipped(x: Dual, limit: float) -> Dual:
    """Return x with its entries clipped to +- limit.

    The slope's jump at the limit is not part of the Hessian. On the limit it is 0, as torch has it.

    Example:
        >>> clipped(Dual(torch.tensor([3.0, 5.0]), torch.tensor([1.0, 1.0])), limit=4.0)
        Dual(value=tensor([3., 4.]), tangent=tensor([1., 0.]))
    """
    return Dual(x.value.clamp(-limit, limit), x.tangent * (x.value.abs() < limit))
