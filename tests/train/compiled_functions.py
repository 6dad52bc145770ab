"""Code that torch's compiler writes for an H100, counted on a machine without one."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import aot_autograd
from torch._inductor import compile_fx, config
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.fx_passes.post_grad import view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _triton
from torch.utils._pytree import tree_leaves

H100 = SimpleNamespace(
    name="NVIDIA H100",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65_536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    L2_cache_size=50 * 2**20,
)


class Compiled(NamedTuple):
    """The kernels of a compiled function, and the bytes that they read and write."""

    kernels: int
    num_bytes: int
    source: str


@contextmanager
def h100() -> Iterator[None]:
    """The compiler takes this machine for one with an H100, and looks for no driver."""
    cuda: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda *_: H100,
        "get_device_capability": lambda *_: (9, 0),
    }
    of_compiler: dict[str, Any] = {
        "get_device_properties": lambda *_: H100,
        "get_compute_capability": lambda *_: 90,
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        stack.enter_context(mock.patch.multiple(CudaInterface, **of_compiler))
        stack.enter_context(mock.patch.object(_triton, "triton_hash_with_backend", return_value=""))
        # Neither random numbers of a GPU, nor patterns of attention that are tried on one.
        stack.enter_context(mock.patch.object(aot_autograd, "preserve_rng_state", nullcontext))
        for module in (joint_graph, post_grad):
            stack.enter_context(mock.patch.object(module, "lazy_init"))
        yield


def compiled(
    function: Callable[..., Any], shapes: Callable[[], tuple[Any, ...]], **options: Any
) -> Compiled:
    """Compile a function as `torch.compile` does, for tensors that `shapes` makes without values.

    The options are the compiler's own.
    """
    outcome: list[Compiled] = []

    def lower(graph_module: Any, inputs: list[Tensor], **_: Any) -> Any:
        view_to_reshape(graph_module)
        fake = compile_fx.fake_tensor_prop(graph_module, inputs)
        with V.set_debug_handler(DebugContext()), V.set_fake_mode(fake):
            compile_fx._recursive_post_grad_passes(graph_module, is_inference=True)
            graph = GraphLowering(graph_module, inputs, fake.shape_env, is_inference=True)
            with V.set_graph_handler(graph):
                graph.run(*inputs)
                source = graph.codegen()[0].value
                counted = graph.count_bytes()[0]
        outcome.append(Compiled(source.count("async_compile.triton("), counted, source))
        return lambda *_: None

    with FakeTensorMode():
        arguments = shapes()
    with h100(), config.patch(options):
        traced = make_fx(lambda *inputs: tuple(tree_leaves(function(*inputs))), tracing_mode="fake")
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        compile_fx.compile_fx(traced(*arguments), tensors, inner_compile=lower)
    return outcome[0]
