"""Recomputation of tensors that autograd would keep, from others that it keeps anyway."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def recomputed(
    outputs: tuple[Tensor, ...], compute: Callable[[], tuple[Tensor, ...]]
) -> Iterator[None]:
    """Within the block, keep `compute` for backward instead of `outputs` and views of them.

    `compute` returns the outputs once more, in the same memory layout; it runs at most once.
    """
    # By storage: what autograd saves may be a view of an output.
    positions = {x.untyped_storage().data_ptr(): index for index, x in enumerate(outputs)}
    again = cache(compute)

    def pack(x: Tensor) -> Any:
        index = positions.get(x.untyped_storage().data_ptr())
        return x if index is None else (index, x.shape, x.stride(), x.storage_offset())

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        index, *view = packed
        output: Tensor = again()[index].detach()
        return output.as_strided(*view)

    with saved_tensors_hooks(pack, unpack):
        yield
