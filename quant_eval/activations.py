"""The residual stream of many sequences between two blocks: on the CPU, in memory or in a scratch file.

Shapes: B sequences of a batch, L tokens of a sequence, D features.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor


class Activations:
    """Batches [B, L, D] in one buffer that is written in place, so that it never takes more than its size.

    Attributes:
        shapes: B and L of every batch.
    """

    def __init__(self, shapes: list[tuple[int, int]], width: int, dtype: torch.dtype, scratch: Path | None) -> None:
        self.shapes, self._width, self._dtype, self._scratch = shapes, width, dtype, scratch
        numel = sum(batch * length for batch, length in shapes) * width
        if scratch is None:
            flat = torch.empty(numel, dtype=dtype)
        else:
            with tempfile.NamedTemporaryFile(dir=scratch, prefix="activations-") as file:  # gone even after a crash
                file.truncate(max(1, numel) * dtype.itemsize)
                flat = torch.from_file(file.name, shared=True, size=numel, dtype=dtype)
        sizes = [batch * length * width for batch, length in shapes]
        self._batches: list[Tensor] = [
            part.view(*shape, width) for part, shape in zip(flat.split(sizes), shapes, strict=True) if sizes
        ]

    def __len__(self) -> int:
        return len(self.shapes)

    def read(self, index: int, device: torch.device) -> Tensor:
        """A batch [B, L, D]; on the CPU the buffer itself."""
        return self._batches[index].to(device, non_blocking=True)

    def write(self, index: int, batch_BLD: Tensor) -> None:
        """Replaces a batch."""
        self._batches[index].copy_(batch_BLD)

    def like(self, width: int | None = None) -> "Activations":
        """An empty one of the same batches."""
        return Activations(self.shapes, width or self._width, self._dtype, self._scratch)

    def fork(self) -> "Activations":
        """A copy."""
        copied = self.like()
        for index in range(len(self)):
            copied.write(index, self._batches[index])
        return copied
