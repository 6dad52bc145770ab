"""The residual stream of many sequences between two blocks: on the GPU, or on the host.

Shapes: B sequences of a batch, L tokens of a sequence, D features.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class _Ahead(NamedTuple):
    """A batch on its way to the GPU."""

    number: int
    batch_BLD: Tensor
    arrival: torch.cuda.Event


class Activations:
    """Batches [B, L, D] in one buffer that is written in place, so it never takes more memory.

    On the host of a GPU the buffer is pinned, and a stream of its own copies: the next batch comes
    while this one is computed. Copies of a buffer keep their order, so a batch that is written is
    never read too early.

    Attributes:
        shapes: B and L of every batch.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        on_device: bool = True,
    ) -> None:
        """`device` is where batches are read to, and where they are kept if `on_device`."""
        self.shapes, self._width, self._dtype = shapes, width, dtype
        self._device, self._on_device = device, on_device
        sizes = [batch * length * width for batch, length in shapes]
        kept_on = device if on_device else torch.device("cpu")
        flat = torch.empty(sum(sizes), dtype=dtype, device=kept_on, pin_memory=not on_device)
        self._batches: list[Tensor] = [
            part.view(*shape, width)
            for part, shape in zip(flat.split(sizes), shapes, strict=True)
            if sizes
        ]
        self._copying = None if on_device else torch.cuda.Stream(device)
        self._ahead: _Ahead | None = None

    def __len__(self) -> int:
        return len(self.shapes)

    def read(self, index: int) -> Tensor:
        """Return a batch [B, L, D] on the device: the buffer itself if it is kept there."""
        if self._copying is None:
            return self._batches[index]
        ahead = self._ahead
        if ahead is None or ahead.number != index:
            ahead = self._fetch(index, self._copying)
        # Started before this batch is waited for, so that it arrives while this one is computed.
        self._ahead = self._fetch(index + 1, self._copying) if index + 1 < len(self) else None
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(ahead.arrival)
        # Allocated on the copying stream: it must not be reused while this stream computes.
        ahead.batch_BLD.record_stream(computing)
        return ahead.batch_BLD

    def write(self, index: int, batch_BLD: Tensor) -> None:
        """Replace a batch."""
        if self._copying is None:
            self._batches[index].copy_(batch_BLD)
            return
        if self._ahead and self._ahead.number == index:
            self._ahead = None  # read before it was replaced
        # The batch may still be in computation on the other stream.
        self._copying.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._copying):
            self._batches[index].copy_(batch_BLD, non_blocking=True)
        # The caller may drop the batch before it has been copied.
        batch_BLD.record_stream(self._copying)

    def like(self, width: int | None = None) -> "Activations":
        """Return uninitialized batches of the same shapes in the same memory."""
        return Activations(
            self.shapes, width or self._width, self._dtype, self._device, self._on_device
        )

    def fork(self) -> "Activations":
        """Return a copy."""
        copied = self.like()
        if self._copying is not None:
            self._copying.synchronize()  # the host copies below
        for target_BLD, batch_BLD in zip(copied._batches, self._batches, strict=True):
            target_BLD.copy_(batch_BLD)
        return copied

    def _fetch(self, index: int, copying: torch.cuda.Stream) -> _Ahead:
        with torch.cuda.stream(copying):
            batch_BLD = self._batches[index].to(self._device, non_blocking=True)
            return _Ahead(index, batch_BLD, copying.record_event())
