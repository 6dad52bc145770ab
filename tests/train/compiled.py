"""The kernels that torch's compiler makes of a layer for a GPU, counted without one.

The layer is traced on fake tensors, partitioned into forward and backward, lowered and scheduled by
inductor as for an H100; no kernel is compiled. A kernel of inductor's reads its inputs and writes
its outputs; matrix products and attention, which libraries have, count as kernels alone.
"""

import copy
import math
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from transformers import AttentionInterface

from tests.train.compiled_functions import h100
from train.run.config import RunConfig

GPU = torch.device("cuda", 0)


class Kernels(NamedTuple):
    """Kernels of forward and backward, and the bytes that those beside products move."""

    kernels: int
    bytes: int


def _attended(_: Any, *query_key_value: Tensor, **__: Any) -> tuple[Tensor, None]:
    """Stand in for transformers' attention, as CUDA's autocast calls the kernel of a GPU."""
    rounded = [x.bfloat16() for x in query_key_value[:3]]
    out = torch.ops.aten._scaled_dot_product_flash_attention(*rounded, 0.0, True)[0]
    return out.transpose(1, 2).contiguous(), None


def _move(graph: torch.fx.GraphModule, mode: FakeTensorMode) -> None:
    """Move a traced graph from the CPU to the GPU."""

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=GPU)

    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
        node.meta.pop("tensor_meta", None)
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": GPU}
    graph.recompile()


def _scheduled(graph: torch.fx.GraphModule, mode: FakeTensorMode) -> Kernels:
    """Count the kernels that inductor schedules for a traced graph on a GPU."""
    _move(graph, mode)
    inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with h100(), V.set_fake_mode(mode), V.set_debug_handler(mock.MagicMock()):
        post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=inputs)
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            lowering.finalize()
            nodes = [
                node
                for node in Scheduler(lowering.operations).nodes
                if not isinstance(node, NopKernelSchedulerNode)
                and not isinstance(node.node, MultiOutput)  # one of several that a kernel returns
            ]
            of_inductor = [x for x in nodes if not isinstance(x, ExternKernelSchedulerNode)]
            moved = sum(int(node.get_read_write_buffers_sizes()) for node in of_inductor)
            return Kernels(len(nodes), moved)


def layer_of_deepspeed(run: RunConfig) -> Kernels:
    """Count forward and backward of one compiled layer of the DeepSpeed engine, in bf16."""
    from train.deepspeed.model import build_model

    small = run.model.model_copy(update={"num_hidden_layers": 1, "vocab_size": 64})
    mode, each = FakeTensorMode(allow_non_fake_inputs=True), []

    def count(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        each.append(_scheduled(copy.deepcopy(gm), mode))
        return make_boxed_func(gm)

    with mode:
        model: Any = build_model(run.model_copy(update={"model": small}))
        AttentionInterface.register("causal_sdpa", _attended)
        layer = model.base_model.layers[0]
        names, weights = zip(*layer.named_parameters(), strict=True)
        shape = run.micro_batch_size, run.data.sequence_length, run.model.hidden_size
        hidden_BSH = torch.empty(shape, requires_grad=True)
        turns = model.base_model.rotary_emb(hidden_BSH, torch.zeros(shape[:2], dtype=torch.long))

        def forward(hidden_BSH: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> Tensor:
            settings = {"attention_mask": None, "position_embeddings": (cos, sin)}
            named = dict(zip(names, weights, strict=True))
            out: Tensor = torch.func.functional_call(layer, named, (hidden_BSH,), settings)
            return out

        compiled = aot_function(
            forward,
            fw_compiler=count,
            bw_compiler=count,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        with torch.autocast("cpu", torch.bfloat16):
            out = compiled(hidden_BSH, *turns, *weights)
        out.backward(torch.empty_like(out))
    return Kernels(*map(sum, zip(*each, strict=True)))


def linear_weights(run: RunConfig) -> int:
    """Return the weights of a layer's linears."""
    from train.model.config import parameter_shapes

    return sum(
        math.prod(shape)
        for name, shape in parameter_shapes(run.model).items()
        if ".layers.0." in name and len(shape) == 2
    )
