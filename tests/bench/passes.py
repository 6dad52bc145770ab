"""`python -m tests.bench.passes`: kernels of an OLMo2-7B layer beside its products and attention.

Counted operator by operator on meta tensors, 4,096 tokens in bf16, forward and backward: before
(commit 97aa180, no function fused), now as a CPU runs it, and now as torch's compiler fuses it for
a GPU. A pass is one read or one write of the residual stream, 4,096 x 4,096 in bf16. The compiler's
bytes are inductor's own count of what its fused loops read and write, at 64 tokens.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train.model import elementwise
from train.model.presets import OLMO2_7B
from train.model.rotary import rotations

LENGTH, SHORT = 4096, 64
SIZE, HEADS, FFN = OLMO2_7B.hidden_size, OLMO2_7B.num_attention_heads, OLMO2_7B.intermediate_size
WIDTH, EPS, BASE = SIZE // HEADS, OLMO2_7B.norm_eps, OLMO2_7B.rope_theta
STREAM = LENGTH * SIZE * 2  # bytes of a pass
COMPILED = [f"{name}{part}" for name in ("_heads", "_normed") for part in ("", "_gradients")]
COMPILED += ["_swiglu", "_swiglu_gradient"]
Layer = Callable[[Tensor, dict[str, Tensor]], Tensor]


class Count(TorchDispatchMode):
    """Counts operators that touch large tensors, but for products, views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.passes, self.muted = 0, 0.0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        aliases = [value.alias_info for value in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        allocation = name.startswith(("empty", "detach", "_unsafe_view", "new_empty"))
        if self.muted or view or allocation or name in ("mm", "addmm", "bmm"):
            return out
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        sizes = [min(x.numel() * x.itemsize, x.untyped_storage().nbytes()) for x in tensors]
        if max(sizes, default=0) >= STREAM // 4:
            self.kernels += 1
            self.passes += sum(sizes) / STREAM
        return out


class Attention(torch.autograd.Function):
    """Attention that computes nothing."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        return torch.empty(inputs[0].shape, dtype=inputs[0].dtype, device=inputs[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return tuple(torch.empty_like(gradient) for _ in range(3))


def heads(x: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Queries, keys and values of the hidden states."""
    qkv = F.linear(x, weights["qkv"]).unflatten(-1, (HEADS, 3 * WIDTH))
    return qkv.split(WIDTH, -1)


def fused(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """A layer as `train.megatron.layers.Olmo2Layer` computes it."""
    query, key, value = heads(x, weights)
    norms = weights["q_norm"], weights["k_norm"]
    query, key = elementwise.normed_and_rotated(
        query, key, *norms, rotary_base=BASE, eps=EPS, group=None
    )
    attended = F.linear(Attention.apply(query, key, value).flatten(2), weights["proj"])
    h = elementwise.normed(attended, weights["norm1"], EPS, x)
    y = F.linear(elementwise.swiglu(F.linear(h, weights["fc1"])), weights["fc2"])
    return elementwise.normed(y, weights["norm2"], EPS, h)


def unfused(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """The same as commit 97aa180 computed it."""

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        flat = x.flatten(2).float()
        squares = flat.square().sum(-1, keepdim=True)
        return (weight * (flat * torch.rsqrt(squares / SIZE + EPS))).to(x.dtype).view(x.shape)

    def rotated(x: Tensor) -> Tensor:
        cos, sin = rotations(LENGTH, WIDTH, BASE, x.device)
        first, second = x.float().chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return turned.to(x.dtype)

    query, key, value = heads(x, weights)
    query, key = rotated(normed(query, weights["q_norm"])), rotated(normed(key, weights["k_norm"]))
    attended = F.linear(Attention.apply(query, key, value).flatten(2), weights["proj"])
    h = x + F.rms_norm(attended, (SIZE,), weights["norm1"], EPS)
    y = F.linear(SwiGlu.apply(F.linear(h, weights["fc1"])), weights["fc2"])
    return h + F.rms_norm(y, (SIZE,), weights["norm2"], EPS)


class SwiGlu(torch.autograd.Function):
    """SwiGLU of commit 97aa180."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gate, up = ctx.saved_tensors[0].chunk(2, -1)
        gradients = torch.empty_like(ctx.saved_tensors[0])
        by_gate, by_up = gradients.chunk(2, -1)
        torch.mul(gradient, F.silu(gate), out=by_up)
        by_gate.copy_(torch.ops.aten.silu_backward(gradient * up, gate))
        return gradients


def count(layer: Layer, *, compiled: bool = False) -> Count:
    """Count a layer's forward and backward pass, its functions fused by inductor or not."""
    shapes: dict[str, tuple[int, ...]] = {"qkv": (3 * SIZE, SIZE), "proj": (SIZE, SIZE)}
    shapes |= {"fc1": (2 * FFN, SIZE), "fc2": (SIZE, FFN)}
    shapes |= dict.fromkeys(("q_norm", "k_norm", "norm1", "norm2"), (SIZE,))

    def leaf(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta", requires_grad=True)

    weights = {name: leaf(*shape) for name, shape in shapes.items()}
    output = torch.empty(LENGTH, 1, SIZE, dtype=torch.bfloat16, device="meta")
    rotations(LENGTH, WIDTH, BASE, output.device)  # once for all layers
    counted = Count()
    with as_compiled(counted) if compiled else nullcontext(), counted:
        layer(leaf(LENGTH, 1, SIZE), weights).backward(output)
    return counted


def inductor_passes(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[int, float]:
    """Loops over tensors that inductor makes of a function, and their passes at full length."""
    from torch._inductor import compile_fx, config, metrics

    def short(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return type(x)(map(short, x)) if isinstance(x, list | tuple) else x
        if x.dim() < 3 or x.shape[0] != LENGTH:  # a weight
            return torch.ones(x.shape, dtype=x.dtype)
        shape = SHORT, *x.shape[1:]
        return torch.empty_strided(shape, x.stride(), dtype=x.dtype).normal_()

    metrics.reset()
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)  # else it counts nothing
    with config.patch(fx_graph_cache=False):
        torch.compile(function)(*(short(x) for x in arguments))
    per_pass = STREAM // LENGTH * SHORT
    # Fused loops with the quarters of their bytes.
    loops = [4 * quarter for _, quarter in metrics.nodes_num_elem if 4 * quarter >= per_pass // 4]
    return len(loops), sum(loops) / per_pass


@contextmanager
def as_compiled(mode: Count) -> Iterator[None]:
    """Count each function of a layer as inductor fuses it."""
    plain = {name: getattr(elementwise, name) for name in COMPILED}
    cache: dict[str, tuple[int, float]] = {}  # a norm has two calls in a layer

    def counting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            mode.muted = True
            key = f"{name} {[x is None for x in arguments]}"
            if key not in cache:
                with torch.utils._python_dispatch._disable_current_modes():
                    cache[key] = inductor_passes(plain[name], arguments)
            kernels, passes = cache[key]
            mode.kernels, mode.passes = mode.kernels + kernels, mode.passes + passes
            result = plain[name](*arguments)
            mode.muted = False
            return result

        return call

    replaced: dict[str, Any] = {name: counting(name) for name in COMPILED}
    with mock.patch.multiple(elementwise, **replaced):
        yield


def main() -> None:
    """Print kernels and passes of the three."""
    for title, layer, compiled in (
        ("before: no function fused", unfused, False),
        ("now, as a CPU runs it", fused, False),
        ("now, as compiled for a GPU", fused, True),
    ):
        counted = count(layer, compiled=compiled)
        line = f"{title:<28} {counted.kernels:>4} kernels {counted.passes:>7.1f} passes\n"
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
