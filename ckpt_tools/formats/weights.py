"""Weights in files of any format, read by the row.

A row is one index of a tensor's first axis. Rows of any number can be asked for, so memory need not
grow with a tensor.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from base.errors import UserError

COMPARED_BYTES = 1 << 20  # of each of two tensors in memory at once
# Names in `--dtype` and run.json.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Described:
    """Shape and type of a tensor that is not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Weights(Protocol):
    """The weights of one model by HF name."""

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Shape and type of every tensor, in the order of the model."""
        ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor, contiguous, on the CPU.

        Raises:
            UserError: a file cannot be read.
        """
        ...


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, live."""
    # As bytes, since numpy has no bfloat16.
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def read_whole(weights: Weights, name: str) -> Tensor:
    """Return all rows of a tensor."""
    return weights.read(name, 0, weights.tensors[name].shape[0])


def same_bytes(weights: Weights, left: str, right: str) -> bool:
    """Return whether two tensors have the same shape, type and bytes."""
    first, second = (weights.tensors[name] for name in (left, right))
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    step = max(1, COMPARED_BYTES // max(first.row_bytes, 1))
    spans = ((start, min(start + step, first.shape[0])) for start in range(0, first.shape[0], step))
    return all(
        bytes_of(weights.read(left, *span)) == bytes_of(weights.read(right, *span))
        for span in spans
    )


def check_tensors(
    tensors: Mapping[str, Described],
    shapes: Mapping[str, tuple[int, ...]],
    source: Path,
    next_action: str,
) -> None:
    """Raise UserError naming tensors that are missing, unknown, or not of another shape."""
    keys = {"missing": shapes.keys() - tensors.keys(), "unknown": tensors.keys() - shapes.keys()}
    problems = [f"{what} {sorted(names)[:3]}" for what, names in keys.items() if names]
    problems += [
        f"'{name}' is {tensors[name].shape}, the model needs {shapes[name]}"
        for name in sorted(shapes.keys() & tensors.keys())
        if tensors[name].shape != shapes[name]
    ]
    if problems:
        raise UserError(f"{source}: {' and '.join(problems[:3])}; {next_action}")


def dtype_of(weights: Weights, allowed: tuple[str, ...], source: Path) -> str:
    """Return the name in `DTYPES` of the one type of all weights; UserError if it is another."""
    names = {DTYPES[name]: name for name in allowed}
    first = next(iter(weights.tensors.values())).dtype
    for name, tensor in weights.tensors.items():
        if tensor.dtype != first or tensor.dtype not in names:
            raise UserError(
                f"{source}: '{name}' is {tensor.dtype}, all weights must be of one type of"
                f" {', '.join(allowed)}; convert them"
            )
    return names[first]


@dataclass(frozen=True)
class FileTensor(Described):
    """A contiguous tensor, row after row, in a file, in little endian."""

    path: Path
    offset: int

    def read(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop), in memory of their own."""
        rows = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        self.read_into(rows, start)
        return rows

    def read_into(self, rows: Tensor, start: int) -> None:
        """Fill a contiguous tensor with as many rows as it has, from row `start` on.

        Files are read, not mapped: mapped pages would count as memory of this process until they
        are unmapped.
        """
        assert (rows.dtype, rows.shape[1:]) == (self.dtype, self.shape[1:])
        assert 0 <= start <= start + len(rows) <= self.shape[0]
        if not rows.numel():
            return
        buffer = bytes_of(rows)
        offset = self.offset + start * self.row_bytes
        with self.path.open("rb", buffering=0) as file:
            while buffer:
                # One read may return less than was asked for; on Linux never more than 2 GiB.
                count = os.preadv(file.fileno(), [buffer], offset)
                if not count:
                    raise UserError(f"{self.path} is truncated; restore it and run again")
                buffer, offset = buffer[count:], offset + count
