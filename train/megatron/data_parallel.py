"""mcore's DDP of one pipeline stage: gradients reduced, and weights gathered, by buckets.

On GPUs both overlap with computation. A bucket is reduced once the last microbatch has added to its
gradients. After an update every rank has its own shard of the weights; the next forward pass
gathers each bucket while it computes with the one before it. So whoever reads the model's weights
otherwise, or writes weights, calls `finish_gather` first.

Over gloo nothing overlaps: its threads would take the cores that compute.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    param_and_grad_buffer,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from base.libraries.private_names import replace
from train.planning.communication import communication

BUCKET_ELEMENTS: int | None = None  # instead of those of `train.planning.communication`
PIECE_ELEMENTS = 1 << 20  # sent at once: few enough to be added while they are in the cache


def overlaps(device: torch.device) -> bool:
    """Return whether collectives run beside computation."""
    return device.type == "cuda"


def averages(group: dist.ProcessGroup) -> bool:
    """Return whether the reduction of gradients divides by the ranks itself; gloo cannot.

    Otherwise mcore divides before, in a pass of its own over all gradients. On a power of two of
    ranks both give the same bits.
    """
    return dist.get_backend(group) == "nccl"


class DataParallel(DistributedDataParallel):
    """One stage with its buffers of weights and gradients, and their pending collectives."""

    def __init__(self, config: TransformerConfig, model: GPTModel, device: torch.device) -> None:
        self.overlaps = overlaps(device)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        rule = communication(group.size())
        settings = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self.overlaps,
            overlap_param_gather=self.overlaps,
            average_in_collective=averages(group),
            pad_buckets_for_high_nccl_busbw=self.overlaps and rule.padded,
        )
        layout = _layout(model, settings, group.size(), BUCKET_ELEMENTS or rule.bucket_elements)
        super().__init__(config, settings, model, full_param_layout=layout)
        if self.overlaps:
            # Within it mcore leaves gradients unreduced: in all microbatches but the last.
            config.no_sync_func = self.no_sync
            self._gather_before_layers(model)
        elif device.type == "cpu":
            _use_gloo_in_place()

    def _gather_before_layers(self, model: Any) -> None:
        """Have a layer wait for all its weights, and the final norm also for the head's.

        mcore's modules wait for their own; fused kernels read weights of other modules.
        """
        for layer in model.decoder.layers:
            self._gather_before(layer, layer.parameters())
        if model.post_process:
            last = model.decoder.final_layernorm
            self._gather_before(last, [*last.parameters(), *model.output_layer.parameters()])

    def _gather_before(
        self, module: torch.nn.Module, parameters: Iterable[torch.nn.Parameter]
    ) -> None:
        # Every bucket once, and in the same order on every rank: waiting may start a gather.
        buckets = dict.fromkeys(self.param_to_bucket_group[parameter] for parameter in parameters)

        def wait(*_: Any) -> None:
            for bucket in buckets:
                bucket.finish_param_sync()

        module.register_forward_pre_hook(wait)

    def start_gather(self) -> None:
        """Begin to gather the first layers' weights, which an update has changed."""
        if self.overlaps:
            # Asked for the weights between backward pass and update, a bucket was gathered then.
            for bucket in self.bucket_groups:
                bucket.param_gather_dispatched = False
            # mcore fills buckets from the last layer back: the last one holds the first layers.
            self.bucket_groups[-1].start_param_sync()

    def finish_gather(self) -> None:
        """Wait until this rank has all updated weights; every rank calls."""
        if self.overlaps:
            for bucket in self.bucket_groups:
                # One that was dispatched and has no handle any more is complete.
                if bucket.param_gather_handle or not bucket.param_gather_dispatched:
                    bucket.start_param_sync(force_sync=True)


def _layout(
    model: GPTModel, settings: DistributedDataParallelConfig, ranks: int, elements: int
) -> FullParamLayout:
    """Return the places of parameters in the buffers: in buckets on every stage, if they overlap.

    mcore itself puts all of a later stage into one bucket.
    """
    return DistributedOptimizer.compute_full_param_layout(
        list(model.parameters()),
        elements if settings.overlap_grad_reduce else None,
        ranks,
        settings,
    )


def _use_gloo_in_place() -> None:
    """Have mcore's buffers use `_all_gather` and `_reduce_scatter`.

    torch's all-gather over gloo copies all it gathers, and its reduce-scatter is an all-reduce that
    copies all it reduces: together a twentieth of a step on CPUs.
    """
    replace(param_and_grad_buffer, "dist_all_gather_func", _all_gather)
    replace(param_and_grad_buffer, "dist_reduce_scatter_func", _reduce_scatter)


def _all_gather(buffer: Tensor, _own: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> None:
    """Fill `buffer` with the shards of all ranks; it holds this rank's already."""
    assert not async_op
    # The chunks are views: a rank sends its own from the buffer and receives the rest into it.
    works: list[Any] = [
        dist.broadcast(shard, group=group, group_src=rank, async_op=True)
        for rank, shard in enumerate(buffer.chunk(group.size()))
    ]
    for work in works:
        work.wait()


def _reduce_scatter(
    _own: Tensor, buffer: Tensor, *, op: Any, group: dist.ProcessGroup, async_op: bool
) -> None:
    """Add the other ranks' values to this rank's shard of `buffer`; the other shards stay."""
    assert op == dist.ReduceOp.SUM
    assert not async_op
    rank, size = group.rank(), group.size()
    peers = [peer for peer in range(size) if peer != rank]
    for pieces in zip(*(shard.split(PIECE_ELEMENTS) for shard in buffer.chunk(size)), strict=True):
        received = [torch.empty_like(pieces[rank]) for _ in peers]
        works: list[Any] = [dist.isend(pieces[peer], group=group, group_dst=peer) for peer in peers]
        works += [
            dist.irecv(part, group=group, group_src=peer)
            for peer, part in zip(peers, received, strict=True)
        ]
        for work in works:
            work.wait()
        # In the order of ranks, not of arrival: the sum has the same bits in every run.
        for part in received:
            pieces[rank].add_(part)
