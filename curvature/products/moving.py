"""Copies between vectors on the host and tensors on a GPU.

`exact.py` and `model.py` call them.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

ENTRIES_AT_ONCE = 1 << 24  # 64 MB in fp32


def copy(target: Tensor, source: Tensor) -> Tensor:
    """Copy a contiguous tensor into another of the same shape, and return that one."""
    for into, part in _pieces(target, source.detach()):
        into.copy_(part)
    return target


def add(target: Tensor, source: Tensor) -> Tensor:
    """Add a contiguous tensor to another of the same shape where that is, and return that one."""
    for into, part in _pieces(target, source.detach()):
        into.add_(part)
    return target


def _pieces(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of the target, and of the source on the target's device.

    Between host and GPU they pass through one pinned buffer: the GPU reads and writes pinned memory
    at the full speed of its bus, and the copy on the host uses all of its threads. Whole vectors
    are not pinned: a basis of many would lock most of a node's memory. The GPU changes the
    precision.
    """
    if {target.device.type, source.device.type} != {"cpu", "cuda"}:
        yield target, source
        return
    pinned = _buffer(source.dtype)
    slices = (flat.split(ENTRIES_AT_ONCE) for flat in (target.view(-1), source.reshape(-1)))
    for into, part in zip(*slices, strict=True):
        yield into, pinned[: len(part)].copy_(part).to(into.device)


@functools.cache
def _buffer(dtype: torch.dtype) -> Tensor:
    return torch.empty(ENTRIES_AT_ONCE, dtype=dtype, pin_memory=True)
