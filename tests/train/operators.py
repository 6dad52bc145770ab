"""The kernels that megatron's model starts, and the bytes they move, counted on meta tensors.

Nothing is computed. An operator reads its inputs and writes its outputs; matrix products and
attention count as kernels alone. A function that torch compiles for a GPU is a kernel that reads
its inputs once: `tests.train.test_compiled_passes` has that of the compiler.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train.model import elementwise
from train.run.config import RunConfig

PRODUCTS = {"mm", "addmm", "bmm"}
INDEXED = {"gather", "scatter_", "scatter_add_"}
MOVES_NOTHING = ("empty", "new_empty", "detach", "_unsafe_view")
COMPILED = [f"{name}{part}" for name in ("_heads", "_normed") for part in ("", "_gradients")]
COMPILED += ["_turned", "_swiglu", "_swiglu_gradient"]


def _bytes(values: Any) -> int:
    tensors = {id(x): x for x in tree_leaves(values) if isinstance(x, Tensor)}.values()
    return sum(min(x.numel() * x.itemsize, x.untyped_storage().nbytes()) for x in tensors)


class Count(TorchDispatchMode):
    """Counts operators but for views and allocations, and the bytes they move."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes = 0, 0
        self.muted = False  # within a compiled function

    def add(self, moved: int) -> None:
        """Count a kernel."""
        self.kernels, self.bytes = self.kernels + 1, self.bytes + moved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if self.muted:
            return out
        aliases = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if is_view or name.startswith(MOVES_NOTHING):
            return out
        if name in PRODUCTS:
            self.add(0)
        elif name in INDEXED:  # an element a row, not the tensor they are taken from or put into
            self.add(2 * _bytes(args[1:]))
        else:
            self.add(_bytes((args, kwargs)) + _bytes(out))
        return out


@contextmanager
def as_compiled(count: Count, module: ModuleType, names: list[str]) -> Iterator[None]:
    """Count functions of a module as torch compiles them."""

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            count.muted = True
            result = function(*arguments)
            count.muted = False
            count.add(_bytes(arguments) + _bytes(result))
            return result

        return call

    with ExitStack() as patches:
        for name in names:
            function = getattr(module, name)
            patches.enter_context(mock.patch.object(module, name, counting(function)))
        yield


class _Attention(torch.autograd.Function):
    """Attention that computes nothing."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return tuple(map(torch.empty_like, ctx.saved_tensors))


def _ids(run: RunConfig) -> Tensor:
    return torch.zeros(1, run.data.sequence_length, dtype=torch.long, device="meta")


@contextmanager
def _alone(run: RunConfig) -> Iterator[None]:
    """Have megatron-core's process groups of one process."""
    from train.megatron.model import initialize_groups

    distributed: Any = dist  # whose stubs lack the store
    dist.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        initialize_groups(run)
        yield
    finally:
        parallel_state = importlib.import_module("megatron.core.parallel_state")
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def megatron_layers(run: RunConfig) -> Count:
    """Count forward and backward of the embedding and all layers of a run."""
    from train.megatron.layers import CausalAttention
    from train.megatron.model import build_model, transformer_config

    def attended(_: Any, *qkv_mask: Tensor, **__: Any) -> Tensor:
        query, key, value = (x.permute(1, 2, 0, 3) for x in qkv_mask[:3])
        out: Tensor = _Attention.apply(query, key, value)
        return out.permute(2, 0, 1, 3).flatten(2)

    count = Count()
    with ExitStack() as stack:
        stack.enter_context(_alone(run))
        config = transformer_config(run)
        config.gradient_accumulation_fusion = False  # there are no buffers
        model = build_model(run, config, torch.device("meta"))
        stack.enter_context(mock.patch.object(CausalAttention, "forward", attended))
        stack.enter_context(as_compiled(count, elementwise, COMPILED))
        stack.enter_context(count)
        hidden = model.embedding(_ids(run), None)
        for layer in model.decoder.layers:
            hidden, _ = layer(hidden)
        hidden.backward(torch.empty_like(hidden))
    return count


def megatron_loss(run: RunConfig) -> Count:
    """Count the head, its losses and their gradients, as a GPU computes them."""
    from train.model import losses

    def pass_over_rows(logits: Tensor, *_: Any, differentiate: bool, **__: Any) -> None:
        count.add((1 + differentiate) * _bytes(logits))

    def leaf(rows: int) -> Tensor:
        width = run.model.hidden_size
        return torch.empty(rows, width, dtype=torch.bfloat16, device="meta", requires_grad=True)

    labels, count = _ids(run).flatten(), Count()
    targets = losses.Targets(labels, labels > 0, 1e-5)
    kernel = {"train.model.cross_entropy": SimpleNamespace(pass_over_rows=pass_over_rows)}
    with (
        mock.patch.dict(sys.modules, kernel),
        mock.patch.object(losses, "_line_by_line", losses._fused),
        count,
    ):
        value, _ = losses.head_losses(leaf(len(labels)), leaf(run.model.vocab_size), targets)
        value.backward()
    return count


def tables(run: RunConfig, *, tied: bool) -> Count:
    """Count embedding, head and losses, and the gradients of both, or of one, in DDP's buffer."""
    from train.model import losses
    from train.model.accumulation import embedded

    def table() -> Tensor:
        shape = run.model.vocab_size, run.model.hidden_size
        weight: Any = torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
        weight.grad_dtype = None  # as `train.megatron.weight_gradients` has it
        buffer = torch.empty(shape, device="meta")

        def add(weight: Tensor) -> None:
            assert weight.grad is not None
            buffer.add_(weight.grad)

        weight.register_post_accumulate_grad_hook(add)
        leaf: Tensor = weight
        return leaf

    head = table()
    embedding = head if tied else table()
    ids, count = _ids(run).flatten(), Count()
    targets = losses.Targets(ids, ids > 0, 1e-5)
    with count:
        value, _ = losses.head_losses(embedded(ids, embedding), head, targets)
        value.backward()
    return count
