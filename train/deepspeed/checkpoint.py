"""What a checkpoint of the DeepSpeed engine holds: the model as trained, and optimizer state by parameter.

    model.safetensors                       the weights the model computes with, by HF name; written by rank 0
    optimizer-00000-of-00002.safetensors    rank 0 of 2: flat fp32 ranges of every parameter, as KIND/HF NAME

KIND is weights, exp_avg, exp_avg_sq or a slot. The metadata says where each range starts in its flattened parameter, so
that ranks of any number read what they hold from whoever wrote it. Neither pickles nor DeepSpeed's own files are used:
those hold one rank's groups, end to end, and load at another world size only through a conversion.
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

from train.command import UserError
from train.deepspeed.sharding import Partition, Piece
from train.run_directory import MODEL_WEIGHTS, fsync_path

MOMENTS = ("exp_avg", "exp_avg_sq")
RESTORE = "delete it to go on from the checkpoint before it"


def optimizer_file(rank: int, world_size: int) -> str:
    """Name of the file that a rank writes."""
    return f"optimizer-{rank:05d}-of-{world_size:05d}.safetensors"


class StateFiles:
    """A copy of this rank's state that needs nothing of the engine any more."""

    def __init__(self, directory: Path, model: dict[str, Tensor] | None) -> None:
        self._directory = directory
        self._files: dict[str, tuple[dict[str, Tensor], dict[str, str]]] = {}
        if model is not None:
            self._files[MODEL_WEIGHTS] = (model, {"format": "pt"})

    def add_state(self, partitions: list[Partition], kinds: dict[str, list[Tensor]], stage: int, step: int) -> None:
        """Copies optimizer state to be written.

        Args:
            partitions: what this rank holds.
            kinds: for each kind, one tensor of the partition's shape per partition.
            stage: ZeRO's.
            step: updates AdamW has counted.
        """
        tensors, starts = {}, {}
        for kind, values in kinds.items():
            for partition, value in zip(partitions, values, strict=True):
                if not partition.counted:
                    continue
                copy = value.detach().to("cpu", copy=True)
                parts = copy.split([piece.length for piece in partition.pieces])
                for piece, part in zip(partition.pieces, parts, strict=True):
                    tensors[f"{kind}/{piece.name}"] = part
                    starts[piece.name] = piece.start
        world_size = dist.get_world_size()
        metadata = {"stage": stage, "world_size": world_size, "step": step, "starts": starts}
        self._files[optimizer_file(dist.get_rank(), world_size)] = (tensors, {"state": json.dumps(metadata)})

    def write(self) -> list[str]:
        """Writes and syncs this rank's files; calls no collective. Their names."""
        for name, (tensors, metadata) in self._files.items():
            save_file(tensors, self._directory / name, metadata)
            (self._directory / name).chmod(0o644)
            fsync_path(self._directory / name)
        return sorted(self._files)

    def seal(self) -> list[str]:
        """Nothing is common to the ranks: their files are complete by themselves."""
        return []


class StateReader:
    """The optimizer state that all ranks of another attempt wrote."""

    def __init__(self, directory: Path, stage: int, files: ExitStack) -> None:
        self._directory = directory
        paths = sorted(directory.glob("optimizer-*.safetensors"))
        if not paths:
            raise UserError(f"{directory} holds no optimizer state of the deepspeed engine; {RESTORE}")
        self._handles = [files.enter_context(safe_open(path, "pt")) for path in paths]
        headers = [json.loads(handle.metadata()["state"]) for handle in self._handles]
        self.step = int(headers[0]["step"])
        world_size, saved_stage = headers[0]["world_size"], headers[0]["stage"]
        if len(paths) != world_size or any(
            {**header, "starts": 0} != {**headers[0], "starts": 0} for header in headers
        ):
            raise UserError(f"{directory} holds {len(paths)} files of optimizer state, not {world_size}; {RESTORE}")
        self._check_layout(saved_stage, stage, world_size)
        self._starts: list[dict[str, int]] = [header["starts"] for header in headers]
        self._keys = [set(handle.keys()) for handle in self._handles]

    def _check_layout(self, saved_stage: int, stage: int, world_size: int) -> None:
        if 3 not in (saved_stage, stage):
            return
        if saved_stage != stage or world_size != dist.get_world_size():
            raise UserError(
                f"{self._directory} was saved at ZeRO stage {saved_stage} by {world_size} processes, this is stage "
                f"{stage} with {dist.get_world_size()}: stage 3 goes on only as it was; set zero.stage to "
                f"{saved_stage} and start {world_size} processes"
            )

    def holds(self, kind: str) -> bool:
        """Whether any rank wrote this kind."""
        return any(key.startswith(f"{kind}/") for keys in self._keys for key in keys)

    def read(self, kind: str, piece: Piece, out: Tensor) -> None:
        """Fills `out` [piece.length] with one kind of state of a range of a parameter."""
        key, filled = f"{kind}/{piece.name}", 0
        for handle, keys, starts in zip(self._handles, self._keys, self._starts, strict=True):
            if key not in keys:
                continue
            part: Any = handle.get_slice(key)
            start = starts[piece.name]
            left = max(piece.start, start)
            right = min(piece.start + piece.length, start + part.get_shape()[0])
            if left < right:
                out[left - piece.start : right - piece.start] = part[left - start : right - start].to(out.device)
                filled += right - left
        if filled != piece.length:
            raise UserError(f"{self._directory} does not fit the model of run.json ({key}); {RESTORE}")


@torch.no_grad()
def read_state(directory: Path, partitions: list[Partition], kinds: dict[str, list[Tensor]], stage: int) -> int:
    """Fills the tensors of every kind, one per partition, from a checkpoint; the updates AdamW had counted.

    A slot that the checkpoint does not hold keeps what it has: a branch may average what its parent did not.

    Raises:
        UserError: files are missing or do not fit the model, or stage 3 is on one side only or at another world size.
        SafetensorError, OSError: a file is damaged or cannot be read.
    """
    with ExitStack() as files:
        reader = StateReader(directory, stage, files)
        for kind, values in kinds.items():
            if kind.startswith("slot.") and not reader.holds(kind):
                continue
            for partition, value in zip(partitions, values, strict=True):
                parts = value.split([piece.length for piece in partition.pieces])
                for piece, part in zip(partition.pieces, parts, strict=True):
                    reader.read(kind, piece, part)
        return reader.step
