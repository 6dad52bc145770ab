"""Host memory that snapshots of both engines copy into, kept from save to save.

Fresh memory costs a page fault every 4 KiB, and a GPU copies into memory that is not pinned only
while the host waits. Here blocks of the sizes that saves need are made once, pinned where there is
CUDA, and copied into on a stream of their own.
"""

import mmap
from collections import defaultdict

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes between the beginnings of two tensors
PORTABLE = 1  # cudaHostRegisterPortable


class Copies:
    """Copies of tensors in a block of host memory.

    Attributes:
        tensors: the copies, in the order of their originals, not to be read before `wait`.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        block: mmap.mmap,
        free: list[mmap.mmap],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.tensors, self._block, self._free = tensors, block, free
        self._made = stream.record_event() if stream else None

    def wait(self) -> None:
        """Wait until the copies are made; any thread may call."""
        if self._made:
            self._made.synchronize()

    def release(self) -> None:
        """Give the memory to the next copies of this size: these are not read any more."""
        self._free.append(self._block)


class SnapshotMemory:
    """Blocks of host memory for the copies of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # By size: every save of a run copies the same tensors, of one or two kinds of checkpoint.
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)

    def copied(self, tensors: list[Tensor]) -> Copies:
        """Return copies of tensors as they are now.

        With CUDA they are made while training continues: `fence` before what they are made of
        changes. An original that is dropped keeps its memory until it is copied.
        """
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        free = self._free[size]
        block = free.pop() if free else self._new_block(size)
        copies = [
            # A storage of its own each, or torch.save would write the whole block for each.
            torch.frombuffer(block, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(
                tensor.shape
            )
            for tensor, start in zip(tensors, starts, strict=True)
        ]
        # The copies begin after the kernels already queued, which still write these tensors.
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor.detach(), non_blocking=True)
                if self._stream and tensor.is_cuda:
                    tensor.record_stream(self._stream)
        return Copies(copies, block, free, self._stream)

    def fence(self) -> None:
        """Let what the GPU computes from here on begin after all copies; the host does not wait."""
        if self._stream:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _new_block(self, size: int) -> mmap.mmap:
        size = max(size, 1)  # none of a rank that writes nothing
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if self._stream:
            address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
            status = torch.cuda.cudart().cudaHostRegister(address, size, PORTABLE)
            torch.cuda.check_error(int(status))
        return block
