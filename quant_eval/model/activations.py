"""The residual stream of many sequences between two blocks, on the CPU.

Shapes: B sequences of a batch, L tokens of a sequence, D features.
"""

import torch
from torch import Tensor


class Activations:
    """Batches [B, L, D] in one buffer that is written in place, so it never takes more memory.

    Attributes:
        shapes: B and L of every batch.
    """

    def __init__(
        self, shapes: list[tuple[int, int]], width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`device` is where batches are read to."""
        self.shapes, self._width, self._dtype, self._device = shapes, width, dtype, device
        sizes = [batch * length * width for batch, length in shapes]
        flat = torch.empty(sum(sizes), dtype=dtype)
        self._batches: list[Tensor] = [
            part.view(*shape, width)
            for part, shape in zip(flat.split(sizes), shapes, strict=True)
            if sizes
        ]

    def __len__(self) -> int:
        return len(self.shapes)

    def read(self, index: int) -> Tensor:
        """Return a batch [B, L, D]; on the CPU the buffer itself."""
        return self._batches[index].to(self._device)

    def write(self, index: int, batch_BLD: Tensor) -> None:
        """Replace a batch."""
        self._batches[index].copy_(batch_BLD)

    def like(self, width: int | None = None) -> "Activations":
        """Return an empty one of the same batches."""
        return Activations(self.shapes, width or self._width, self._dtype, self._device)

    def fork(self) -> "Activations":
        """Return a copy."""
        copied = self.like()
        for index in range(len(self)):
            copied.write(index, self._batches[index])
        return copied
