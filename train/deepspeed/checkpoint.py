"""The files of a DeepSpeed checkpoint: the model, and optimizer state by parameter.

model.safetensors, written by rank 0, holds the weights that the model computes with, by HF name.
optimizer-00000-of-00002.safetensors, of rank 0 of 2, holds flat fp32 ranges of parameters as
KIND/HF NAME, where KIND is weights, exp_avg, exp_avg_sq or a slot. The metadata says where each
range starts in its flattened parameter: any number of ranks finds its state in the files.

DeepSpeed's own files are pickles of one rank's groups, end to end, and load at another world size
only through a conversion.
"""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from base.errors import UserError
from base.files import fsync_path
from train.deepspeed.sharding import Partition, Piece
from train.run.directory import MODEL_WEIGHTS

MOMENTS = ("exp_avg", "exp_avg_sq")
RESTORE = "restore it, or delete it to resume from the checkpoint before it"


def optimizer_file(rank: int, world_size: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"optimizer-{rank:05d}-of-{world_size:05d}.safetensors"


class StateFiles:
    """A copy of this rank's state, independent of the engine: `train.engine.Snapshot`."""

    def __init__(self, directory: Path, model: dict[str, Tensor] | None) -> None:
        self._directory = directory
        self._files: dict[str, tuple[dict[str, Tensor], dict[str, str]]] = {}
        if model is not None:
            self._files[MODEL_WEIGHTS] = (model, {"format": "pt"})

    def add_state(
        self, partitions: list[Partition], kinds: dict[str, list[Tensor]], step: int
    ) -> None:
        """Copy optimizer state to be written.

        Args:
            partitions: what this rank holds.
            kinds: for each kind, one tensor of the partition's shape per partition.
            step: updates AdamW has counted.
        """
        tensors, starts = {}, {}
        for kind, values in kinds.items():
            for partition, value in zip(partitions, values, strict=True):
                copy = value.detach().to("cpu", copy=True)
                parts = copy.split([piece.length for piece in partition.pieces])
                for piece, part in zip(partition.pieces, parts, strict=True):
                    tensors[f"{kind}/{piece.name}"] = part
                    starts[piece.name] = piece.start
        world_size = dist.get_world_size()
        metadata = {"world_size": world_size, "step": step, "starts": starts}
        self._files[optimizer_file(dist.get_rank(), world_size)] = (
            tensors,
            {"state": json.dumps(metadata)},
        )

    def write(self) -> list[str]:
        """Write and sync this rank's files, without a collective; return their names."""
        for name, (tensors, metadata) in self._files.items():
            save_file(tensors, self._directory / name, metadata)
            (self._directory / name).chmod(0o644)
            fsync_path(self._directory / name)
        return sorted(self._files)

    def seal(self) -> list[str]:
        """Return nothing: no file is common to the ranks."""
        return []


class StateReader:
    """The optimizer state that all ranks of another attempt wrote."""

    def __init__(self, directory: Path, files: ExitStack) -> None:
        self._directory = directory
        paths = sorted(directory.glob("optimizer-*.safetensors"))
        if not paths:
            raise UserError(
                f"{directory} holds no optimizer state of the deepspeed engine; {RESTORE}"
            )
        self._handles = [files.enter_context(safe_open(path, "pt")) for path in paths]
        headers = [json.loads(handle.metadata()["state"]) for handle in self._handles]
        self.step = int(headers[0]["step"])
        world_size = headers[0]["world_size"]
        if len(paths) != world_size or any(
            {**header, "starts": 0} != {**headers[0], "starts": 0} for header in headers
        ):
            raise UserError(
                f"{directory} holds {len(paths)} files of optimizer state, not {world_size};"
                f" {RESTORE}"
            )
        self._starts: list[dict[str, int]] = [header["starts"] for header in headers]
        self._keys = [set(handle.keys()) for handle in self._handles]

    def holds(self, kind: str) -> bool:
        """Return whether any rank wrote this kind."""
        return any(key.startswith(f"{kind}/") for keys in self._keys for key in keys)

    def read(self, kind: str, piece: Piece, out: Tensor) -> None:
        """Fill `out` [piece.length] with one kind of state of a range of a parameter."""
        key, filled = f"{kind}/{piece.name}", 0
        for handle, keys, starts in zip(self._handles, self._keys, self._starts, strict=True):
            if key not in keys:
                continue
            part: Any = handle.get_slice(key)
            start = starts[piece.name]
            left = max(piece.start, start)
            right = min(piece.start + piece.length, start + part.get_shape()[0])
            if left < right:
                out[left - piece.start : right - piece.start] = part[
                    left - start : right - start
                ].to(out.device)
                filled += right - left
        if filled != piece.length:
            raise UserError(
                f"{self._directory} does not fit the model of run.json ({key}); {RESTORE}"
            )


@torch.no_grad()
def read_state(directory: Path, partitions: list[Partition], kinds: dict[str, list[Tensor]]) -> int:
    """Fill the tensors of every kind from a checkpoint; return the updates AdamW had counted.

    A slot that the checkpoint does not hold keeps what it has: a branch may average what its parent
    did not.

    Raises:
        UserError: files are missing or do not fit the model.
        SafetensorError, OSError: a file is damaged or cannot be read.
    """
    with ExitStack() as files:
        reader = StateReader(directory, files)
        for kind, values in kinds.items():
            if kind.startswith("slot.") and not reader.holds(kind):
                continue
            for partition, value in zip(partitions, values, strict=True):
                parts = value.split([piece.length for piece in partition.pieces])
                for piece, part in zip(partition.pieces, parts, strict=True):
                    reader.read(kind, piece, part)
        return reader.step
