"""The functions between the matrix products of a layer: in fp32, rounded to their dtype once.

These are the norms of queries and keys with the rotary embedding, a norm with the residual it is
added to, and SwiGLU. Their gradients are written out, so backward keeps inputs only, and each
compiles to a pass or two over its tensors on a GPU. `train.megatron.layers` calls them.

Shapes: S tokens, B sequences, N heads of this rank, D head size, H hidden size, F intermediate
size of this rank, W features of a norm: hidden size, or N x D. A CPU is slow on the rows of a head
in the output of a linear, which are short and apart: norms take [S, B, W].
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from base.gpus import has_compiler
from train.model.config import Llama3Scaling
from train.model.rotary import rotated, rotations

Group = dist.ProcessGroup | None  # ranks that have other heads of the same tokens


# Have the compiler compute all gradients of a norm in one pass: it fuses the sums over features and
# over tokens of fixed shapes only, and would write what both read, which is of several tensors.
ONE_PASS: dict[str, Any] = {"dynamic": False, "options": {"realize_reads_threshold": 16}}


def compiled_on_gpu[Function: Callable[..., Any]](
    function: Function, settings: dict[str, Any] | None = None
) -> Function:
    """Return the function compiled by torch where there are a GPU and a C compiler.

    Elsewhere it runs line by line, in more passes; `train.run.launch` says so of a GPU.
    """
    compiles = torch.cuda.is_available() and has_compiler()
    compiled: Any = torch.compile(function, **(settings or {})) if compiles else function
    return compiled  # type: ignore[no-any-return]


def _in_one_pass[Function: Callable[..., Any]](function: Function) -> Function:
    return compiled_on_gpu(function, ONE_PASS)


def _over_ranks(sums: list[Tensor], group: Group) -> list[Tensor]:
    """Return sums over the features of several tensors, added over ranks in one reduction."""
    if group is None:
        return sums
    stacked = torch.stack(sums)
    dist.all_reduce(stacked, group=group)
    return list(stacked)


def _num_features(x_SBW: Tensor, group: Group) -> int:
    return x_SBW.shape[-1] * (1 if group is None else group.size())


def _inverse_rms(tensors: Sequence[Tensor], eps: float, group: Group) -> list[Tensor]:
    """Return 1 / sqrt(mean of squares + eps) per token and tensor: [S, B, 1] in fp32."""
    norms = [
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32) for x in tensors
    ]
    # Squares add up over the features of all ranks; norms do not.
    squares = _over_ranks([norm.square() for norm in norms], group)
    return [
        torch.rsqrt(square / _num_features(x, group) + eps)
        for x, square in zip(tensors, squares, strict=True)
    ]


def _norm_gradients(
    tensors: Sequence[Tensor],
    weights: Sequence[Tensor],
    inverses: Sequence[Tensor],
    gradients: Sequence[Tensor],
    group: Group,
) -> list[Tensor]:
    """Return the gradients of norms by their inputs, then by their weights.

    With n = x / rms(x) and y = w n: dw is the sum of dy n over tokens, and
    dx = (w dy - n <w dy, n> / features) / rms(x).
    """
    # One axis of tokens: the compiler fuses sums along the rows of a matrix and along its columns.
    shapes = [x.shape for x in tensors]
    tensors, inverses, gradients = (
        [x.flatten(0, 1) for x in each] for each in (tensors, inverses, gradients)
    )
    normed = [x * inverse for x, inverse in zip(tensors, inverses, strict=True)]
    products = [dy * n for dy, n in zip(gradients, normed, strict=True)]
    dots = _over_ranks(
        [
            (product @ weight.float()).unsqueeze(-1)
            for product, weight in zip(products, weights, strict=True)
        ],
        group,
    )
    by_input = []
    for x, n, weight, inverse, dy, dot, shape in zip(
        tensors, normed, weights, inverses, gradients, dots, shapes, strict=True
    ):
        along = (dy * weight.float()).mul_(inverse)
        by_x = along.addcmul_(n, dot * inverse / -_num_features(x, group)).to(x.dtype)
        by_input.append(by_x.view(shape))
    by_weight = [product.sum(0) for product in products]  # over all tokens, left in fp32
    return by_input + by_weight


@compiled_on_gpu
def _normed(
    x: Tensor, weight: Tensor, residual: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    (inverse,) = _inverse_rms([x], eps, None)
    normed = (x * inverse).mul_(weight)
    if residual is not None:
        normed.add_(residual)
    return normed.to(x.dtype), inverse


@_in_one_pass
def _normed_gradients(x: Tensor, weight: Tensor, inverse: Tensor, gradient: Tensor) -> list[Tensor]:
    return _norm_gradients([x], [weight], [inverse], [gradient.float()], None)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, residual: Tensor | None, eps: float) -> Tensor:
        normed, inverse = _normed(x, weight, residual, eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.has_residual = residual is not None
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        by_input, by_weight = _normed_gradients(x, weight, inverse, gradient)
        # The residual is added as it is: its gradient is the one of the output.
        return by_input, by_weight, gradient if ctx.has_residual else None, None


def normed(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Return the RMSNorm of x [S, B, H], added to the residual if there is one.

    Args:
        x: fp32 or bf16.
        weight: [H].
        eps: added to the mean square.
        residual: of x's shape.

    Example: (1, 7) has the root mean square 5.
        >>> normed(torch.tensor([[[1.0, 7.0]]]), torch.ones(2), eps=0.0)
        tensor([[[0.2000, 1.4000]]])
    """
    result: Tensor = _Normed.apply(x, weight, residual, eps)
    return result


@compiled_on_gpu
def _heads(
    heads: Sequence[Tensor],
    weights: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    group: Group,
) -> tuple[list[Tensor], list[Tensor]]:
    # A norm is over all heads of a token together.
    rows = [head.flatten(2) for head in heads]
    inverses = _inverse_rms(rows, eps, group)
    outputs = [
        rotated((x * inverse).mul_(weight).view(head.shape), cos, sin).to(x.dtype)
        for head, x, weight, inverse in zip(heads, rows, weights, inverses, strict=True)
    ]
    return outputs, inverses


@_in_one_pass
def _heads_gradients(
    heads: Sequence[Tensor],
    weights: Sequence[Tensor],
    inverses: Sequence[Tensor],
    gradients: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    group: Group,
) -> list[Tensor]:
    rows = [head.flatten(2) for head in heads]
    # The gradient of a rotation is the rotation back.
    back = [rotated(gradient.contiguous(), cos, -sin).flatten(2) for gradient in gradients]
    by_inputs = _norm_gradients(rows, weights, inverses, back, group)
    by_heads = [by_x.view(head.shape) for by_x, head in zip(by_inputs, heads, strict=False)]
    return by_heads + by_inputs[len(heads) :]


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        turns: tuple[Tensor, Tensor],
        eps: float,
        group: Group,
    ) -> tuple[Tensor, ...]:
        outputs, inverses = _heads([query, key], [query_weight, key_weight], *turns, eps, group)
        ctx.save_for_backward(query, key, query_weight, key_weight, *inverses)
        ctx.turns, ctx.group = turns, group
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        saved, (cos, sin) = ctx.saved_tensors, ctx.turns
        inputs = saved[:2], saved[2:4], saved[4:], gradients
        if ctx.group is None:
            by_query, by_key = (
                _heads_gradients([head], [weight], [inverse], [gradient], cos, sin, None)
                for head, weight, inverse, gradient in zip(*inputs, strict=True)
            )
            by_inputs = [by_query[0], by_key[0], by_query[1], by_key[1]]
        else:  # both together, for one reduction
            by_inputs = _heads_gradients(*inputs, cos, sin, ctx.group)
        return *by_inputs, None, None, None


def normed_and_rotated(
    query_SBND: Tensor,
    key: Tensor,
    query_weight_W: Tensor,
    key_weight: Tensor,
    *,
    rotary_base: float,
    rope_scaling: Llama3Scaling | None = None,
    eps: float,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys after their norms over all heads and the rotary embedding.

    A norm is over the heads of all ranks of `group`: one reduction for queries and keys together,
    forward and backward. A plain all-reduce of the squares alone would get the gradient wrong.
    Positions count from 0.
    """
    length, _, _, head_dim = query_SBND.shape
    turns = rotations(length, head_dim, rotary_base, query_SBND.device, rope_scaling)
    query, key = _Heads.apply(query_SBND, key, query_weight_W, key_weight, turns, eps, group)
    return query, key


@compiled_on_gpu
def _turned(heads: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    return [rotated(head, cos, sin).to(head.dtype) for head in heads]


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, turns: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        ctx.turns = turns
        return tuple(_turned([query, key], *turns))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        cos, sin = ctx.turns
        return *_turned([gradient.contiguous() for gradient in gradients], cos, -sin), None


def rotated_heads(
    query_SBND: Tensor,
    key: Tensor,
    *,
    rotary_base: float,
    rope_scaling: Llama3Scaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Return queries and keys after the rotary embedding, rounded once; positions from 0."""
    length, _, _, head_dim = query_SBND.shape
    turns = rotations(length, head_dim, rotary_base, query_SBND.device, rope_scaling)
    query, key = _Rotated.apply(query_SBND, key, turns)
    return query, key


@compiled_on_gpu
def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


@compiled_on_gpu
def _swiglu_gradient(gate_up: Tensor, gradient: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    by_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    return torch.cat((by_gate, F.silu(gate).mul_(gradient)), -1)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        return _swiglu_gradient(gate_up, gradient)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [S, B, F], of [gate, up] in one tensor [S, B, 2 F].

    Example: silu(0) is 0, silu(1) is 0.7311.
        >>> swiglu(torch.tensor([[[0.0, 1.0, 3.0, 2.0]]]))
        tensor([[[0.0000, 1.4621]]])
    """
    result: Tensor = _SwiGlu.apply(gate_up)
    return result
