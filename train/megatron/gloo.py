"""The data-parallel collectives of megatron-core over gloo, in place.

torch's all-gather copies all it gathers, and its reduce-scatter is an all-reduce that copies all it
reduces: together a twentieth of a step on CPUs. `train.megatron.data_parallel` uses these there.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from torch import Tensor

PIECE_ELEMENTS = 1 << 20  # sent at once: what arrives is added while it is in the cache


def use_collectives_in_place() -> None:
    """Have megatron-core's buffers of parameters and gradients use this file's collectives."""
    module: Any = param_and_grad_buffer
    module.dist_all_gather_func, module.dist_reduce_scatter_func = _all_gather, _reduce_scatter


def _all_gather(whole: Tensor, _own: Tensor, *, group: dist.ProcessGroup, async_op: bool) -> None:
    """Fill `whole` with the shards of all ranks; it holds this rank's already."""
    assert not async_op
    works = [
        dist.broadcast(shard, group=group, group_src=rank, async_op=True)
        for rank, shard in enumerate(whole.chunk(group.size()))
    ]
    for work in works:
        work.wait()


def _reduce_scatter(
    _own: Tensor, whole: Tensor, *, op: Any, group: dist.ProcessGroup, async_op: bool
) -> None:
    """Add the other ranks' values to this rank's shard of `whole`; the other shards stay."""
    assert op == dist.ReduceOp.SUM
    assert not async_op
    own, size = group.rank(), group.size()
    peers = [rank for rank in range(size) if rank != own]
    for pieces in zip(*(shard.split(PIECE_ELEMENTS) for shard in whole.chunk(size)), strict=True):
        received = [torch.empty_like(pieces[own]) for _ in peers]
        works: list[Any] = [dist.isend(pieces[peer], group=group, group_dst=peer) for peer in peers]
        works += [
            dist.irecv(part, group=group, group_src=peer)
            for peer, part in zip(peers, received, strict=True)
        ]
        for work in works:
            work.wait()
        for part in received:
            pieces[own].add_(part)
