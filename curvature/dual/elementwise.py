"""Norms, rotary embedding and SwiGLU in dual numbers, with their derivatives written out.

The backward pass keeps inputs only. A gradient by a value is H, one by a tangent G.

Shapes: I features, F width of an MLP, E features of a head; "..." is any axes before them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from curvature.dual.numbers import Dual, centred
from curvature.dual.one_pass import one_pass, wide


def rms_norm(x: Dual, weight: Dual, epsilon: float, residual: Dual | None = None) -> Dual:
    """Return the RMSNorm w n of x (Zhang and Sennrich 2019), added to the residual if there is one.

    With r = (mean x^2 + epsilon)^(-1/2) and means over features: n = x r and n_dot = r (x_dot - n
    mean(n x_dot)).
    """
    added = (None, None) if residual is None else residual
    return Dual(*_RMSNorm.apply(*x, *weight, *added, epsilon))


def layer_norm(x: Dual, weight: Dual, bias: Dual, epsilon: float) -> Dual:
    """Return the LayerNorm of x (Ba et al. 2016)."""
    return rms_norm(centred(x), weight, epsilon) + bias


def _mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


@one_pass
def _normed(
    x: Tensor,
    x_dot: Tensor,
    weight_I: Tensor,
    weight_dot_I: Tensor,
    residual: Tensor | None,
    residual_dot: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    x, x_dot = wide(x), wide(x_dot)
    scale = torch.rsqrt(_mean(x.square()) + epsilon)
    n = x * scale
    # y_dot = w n_dot + w_dot n, made while n is not yet y.
    n_dot = (x_dot - n * _mean(n * x_dot)).mul_(scale).mul_(weight_I).addcmul_(n, weight_dot_I)
    n.mul_(weight_I)
    if residual is None or residual_dot is None:
        return n, n_dot
    return n.add_(residual), n_dot.add_(residual_dot)


@one_pass
def _normed_gradients(
    x: Tensor,
    x_dot: Tensor,
    weight_I: Tensor,
    weight_dot_I: Tensor,
    by_y: Tensor,
    by_y_dot: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by x, x_dot and w.

    With q = w G, b = w H + w_dot G, m = mean(n x_dot), k = mean(n q), and the parts of x_dot and q
    orthogonal to n, t = x_dot - n m and u = q - n k:
        by x_dot: r u,    by w: sum over tokens of H n + G n_dot, n_dot = r t,
        by x: r (b - n mean(n b) - r (m u + k t + n (mean(u t) + k m epsilon r^2))).
    Written in x_dot and q the last one would be a small difference of large numbers where m and k
    are large.
    """
    dtype, x, x_dot = x.dtype, wide(x), wide(x_dot)
    scale = torch.rsqrt(_mean(x.square()) + epsilon)
    n = x * scale
    q = by_y_dot * weight_I
    b = (by_y * weight_I).addcmul_(by_y_dot, weight_dot_I)
    m, k = _mean(n * x_dot), _mean(n * q)
    t, u = x_dot - n * m, q.addcmul_(n, k, value=-1)
    along = _mean(n * b) + scale * (_mean(u * t) + epsilon * scale.square() * k * m)
    by_x = b.addcmul_(n, along, value=-1).addcmul_(u, scale * m, value=-1)
    by_x = by_x.addcmul_(t, scale * k, value=-1).mul_(scale)
    by_weight_I = (by_y * n).addcmul_(by_y_dot, t.mul_(scale)).flatten(0, -2).sum(0)
    return by_x.to(dtype), u.mul_(scale).to(dtype), by_weight_I.to(weight_I.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*arguments[:4])
        ctx.added, ctx.epsilon = arguments[4] is not None, arguments[-1]
        return _normed(*arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_y: Tensor, by_y_dot: Tensor) -> Any:  # type: ignore[override]
        x, x_dot, weight, weight_dot = ctx.saved_tensors
        by_inputs = _normed_gradients(x, x_dot, weight, weight_dot, by_y, by_y_dot, ctx.epsilon)
        by_residual = (by_y, by_y_dot) if ctx.added else (None, None)
        # A weight's tangent is given, so it takes no gradient; nor does epsilon.
        return *by_inputs, None, *by_residual, None


def swiglu(gate: Dual, up: Dual) -> Dual:
    """Return silu(a) u (Shazeer 2020), in the precision of the arguments."""
    return Dual(*_SwiGLU.apply(*gate, *up))


def _silu(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sigmoid s, f = a s (Elfwing et al. 2018) and its slope f' = s + f (1 - s)."""
    s = torch.sigmoid(a)
    f = a * s
    # lerp(f, 1, s) = f + s (1 - f) = s + f (1 - s).
    return s, f, torch.lerp(f, torch.ones_like(f[..., :1]), s)


@one_pass
def _gated(a: Tensor, a_dot: Tensor, u: Tensor, u_dot: Tensor) -> tuple[Tensor, Tensor]:
    _, f, slope = _silu(wide(a))
    y_dot = slope.mul_(a_dot).mul_(u).addcmul_(f, u_dot)
    return f.mul_(u).to(a.dtype), y_dot.to(a.dtype)


@one_pass
def _gated_gradients(
    a: Tensor, a_dot: Tensor, u: Tensor, u_dot: Tensor, by_y: Tensor, by_y_dot: Tensor
) -> list[Tensor]:
    """Return the gradients by a, a_dot, u and u_dot.

    By u_dot: G f,    by u: H f + G f' a_dot,    by a_dot: G f' u,
    by a: u (H f' + G f'' a_dot) + G f' u_dot, with f'' = s (1 - s) (2 + a - 2 f).
    """
    dtype, a = a.dtype, wide(a)
    s, f, slope = _silu(a)
    # G a_dot f'': the backward of a sigmoid gives the factor s (1 - s).
    bend = torch.ops.aten.sigmoid_backward(wide(by_y_dot * a_dot), s)
    bend.mul_(torch.sub(a, f, alpha=2).add_(2))
    by_slope = slope * by_y_dot
    by_u = (f * by_y).addcmul_(by_slope, a_dot)
    by_a = bend.addcmul_(slope, by_y).mul_(u).addcmul_(by_slope, u_dot)
    return [gradient.to(dtype) for gradient in (by_a, by_slope.mul_(u), by_u, f.mul_(by_y_dot))]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*arguments)
        return _gated(*arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_y: Tensor, by_y_dot: Tensor) -> Any:  # type: ignore[override]
        a, a_dot, u, u_dot = ctx.saved_tensors
        return tuple(_gated_gradients(a, a_dot, u, u_dot, by_y, by_y_dot))


def rotated(x: Dual, cos_SE: Tensor, sin_SE: Tensor, dtype: torch.dtype) -> Dual:
    """Return heads [..., S, E] with their rotary embedding (Su et al. 2021), in `dtype`.

    A pair of features (i, i + E/2) turns by one angle, so both halves of the tables are the same.
    Further features than the tables have pass as they are.

    Example: a quarter turn of (1, 2).
        >>> x = Dual(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2))
        >>> rotated(x, torch.zeros(1, 2), torch.ones(1, 2), torch.float32).value
        tensor([[-2.,  1.]])
    """
    return Dual(*_Rotated.apply(*x, cos_SE, sin_SE, dtype))


@one_pass
def _turned(
    x: Tensor, x_dot: Tensor, cos_SE: Tensor, sin_SE: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    turning = cos_SE.shape[-1]
    half = turning // 2
    sin = sin_SE[..., :half]
    results = []
    for source in (wide(x), wide(x_dot)):
        result = source.clone(memory_format=torch.contiguous_format)
        result[..., :turning].mul_(cos_SE)
        result[..., :half].addcmul_(source[..., half:turning], sin, value=-1)
        result[..., half:turning].addcmul_(source[..., :half], sin)
        results.append(result.to(dtype))
    return results


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, x_dot: Tensor, cos_SE: Tensor, sin_SE: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        ctx.tables, ctx.dtype = (cos_SE, sin_SE), x.dtype
        return tuple(_turned(x, x_dot, cos_SE, sin_SE, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_y: Tensor, by_y_dot: Tensor) -> Any:  # type: ignore[override]
        cos_SE, sin_SE = ctx.tables
        # The transpose of a rotation turns back by the same angle.
        return *_turned(by_y, by_y_dot, cos_SE, -sin_SE, ctx.dtype), None, None, None
