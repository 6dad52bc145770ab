"""The processes that measure one model together: started by torchrun, or one alone."""

import heapq
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from base.errors import UserError
from base.gpus import check_fp32, refuse_cuda

WAIT = timedelta(hours=12)  # for rank 0, while it runs another project's library
ENTRIES_PER_SUM = 1 << 26  # a tensor on the host takes at most 256 MB of the GPU


class Ranks(NamedTuple):
    """The rank of this process, the number of ranks, and the device that it computes on."""

    rank: int
    size: int
    device: torch.device

    def share(self, count: int) -> range:
        """Return the rank's consecutive items of `count`; shares differ by one at most."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a contiguous tensor over the ranks, in place; every rank has to call it."""
        if self.size > 1:
            for part in tensor.view(-1).split(ENTRIES_PER_SUM):
                on_device = part.to(self.device)  # NCCL takes what is on the GPU only
                dist.all_reduce(on_device)
                if on_device is not part:
                    part.copy_(on_device)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Return the largest of each element over the ranks; every rank has to call it."""
        # Of `size` rows each rank has one as its share.
        return self.gather(tensor[None], self.size).amax(0)

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        """Give a contiguous tensor the values of rank `owner`; every rank has to call it."""
        assert tensor.is_contiguous()
        if self.size > 1:
            dist.broadcast(tensor, owner)

    def gather(self, rows: Tensor, count: int) -> Tensor:
        """Return all `count` rows, from every rank's `share` of them; every rank has to call it."""
        if self.size == 1:
            return rows
        sizes = [len(self._replace(rank=rank).share(count)) for rank in range(self.size)]
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])  # all send as many
        padded[: len(rows)] = rows
        everyone = rows.new_empty(self.size * max(sizes), *rows.shape[1:])
        dist.all_gather_into_tensor(everyone, padded)
        parts = zip(everyone.split(max(sizes)), sizes, strict=True)
        return torch.cat([part[:size] for part, size in parts])

    def gather_values[T](self, value: T) -> list[T]:
        """Return the value of every rank, in their order; every rank has to call it."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait until every rank has called this."""
        if self.size > 1:
            dist.barrier()


ALONE = Ranks(0, 1, torch.device("cpu"))  # a process by itself


def even_shares[T: (int, str)](sizes: Mapping[T, float], ranks: int) -> list[list[T]]:
    """Return the items for each rank, so that their sizes sum to about the same.

    The largest goes first, each to the rank that has the least: none has more than the mean and the
    largest, nor than 4/3 of the least possible (Graham 1969, doi 10.1137/0117039, of jobs on
    machines).

    Example:
        >>> even_shares({"a": 1, "b": 5, "c": 4, "d": 2}, ranks=2)
        [['b', 'a'], ['c', 'd']]
    """
    shares: list[list[T]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for item in sorted(sizes, key=lambda item: (-sizes[item], item)):
        load, rank = loads[0]
        shares[rank].append(item)
        heapq.heapreplace(loads, (load + sizes[item], rank))
    return shares


def spans_of_ranks(begin: int, end: int, size: int) -> dict[int, tuple[int, int]]:
    """Return the part of [begin, end) that each rank holds, counted from `begin`, by rank.

    All elements lie end to end, and every rank holds `size` of them.

    Example:
        >>> spans_of_ranks(3, 9, size=4)
        {0: (0, 1), 1: (1, 5), 2: (5, 6)}
    """
    ranks = range(begin // size, (end - 1) // size + 1)
    return {
        rank: (max(begin, rank * size) - begin, min(end, (rank + 1) * size) - begin)
        for rank in ranks
    }


def own_gpu() -> torch.device:
    """Return the GPU of this rank, made current; UserError if there is none, or no fp32 on it."""
    check_fp32()
    index, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if count == 0:
        refuse_cuda()
    if count == 1 and "SLURM_LOCALID" in os.environ:
        index = 0  # with --gpus-per-task=1 every rank sees its own GPU as number 0
    if index >= count:
        raise UserError(
            f"this machine has {count} GPUs for rank {index}; start fewer, or use --device cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def start(device: str) -> Ranks:
    """Join the other ranks that torchrun started: gloo on CPUs, NCCL with a GPU for each."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    torch_device = own_gpu() if device == "cuda" else torch.device(device)
    if size > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=WAIT)
    return Ranks(rank, size, torch_device)
