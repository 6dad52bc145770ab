"""The files of a DeepSpeed checkpoint: the model, and optimizer state by parameter.

The weights that the model computes with are whole tensors by HF name, in files as of an HF
directory: model.safetensors of one rank, about as much in a file of each of several, and an index.
optimizer-00000-of-00002.safetensors, of rank 0 of 2, holds flat fp32 ranges of parameters as
KIND/HF NAME, where KIND is weights, a state of the optimizer or a slot. The metadata says where
each range starts in its flattened parameter: any number of ranks finds its state in the files. A
state of a whole matrix is in one file, as matrix/HF NAME.KEY.

DeepSpeed's own files are pickles of one rank's groups, end to end, and load at another world size
only through a conversion.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from base.errors import UserError
from base.files import open_to_readers, write_json
from base.ranks import even_shares
from train.deepspeed.sharding import ParameterRange, StatePart
from train.run.directory import MODEL_INDEX, MODEL_WEIGHTS
from train.snapshot_memory import Copies, SnapshotMemory

Whole = Callable[[Sequence[str], Sequence[str]], dict[str, Tensor]]


class StateFiles:
    """A copy of this rank's state, independent of the engine: `train.engine.Snapshot`."""

    def __init__(self, directory: Path, memory: SnapshotMemory) -> None:
        self._directory, self._memory = directory, memory
        self._copies: list[Copies] = []
        self._files: dict[str, tuple[dict[str, Tensor], dict[str, str]]] = {}
        self._weight_map: dict[str, str] = {}  # the file of each weight

    def add_model(self, sizes: dict[str, int], whole: Whole) -> None:
        """Copy this rank's share of the weights that the model computes with; all ranks call.

        Args:
            sizes: numbers of every parameter.
            whole: takes names that all ranks give, and which of them this one wants.
        """
        shares = [names for names in even_shares(sizes, dist.get_world_size()) if names]
        mine: list[str] = []
        mine_in = ""
        for number, names in enumerate(shares, 1):
            file = f"model-{number:05d}-of-{len(shares):05d}.safetensors"
            file = file if len(shares) > 1 else MODEL_WEIGHTS
            self._weight_map |= dict.fromkeys(names, file)
            if number == dist.get_rank() + 1:
                mine, mine_in = names, file
        weights = whole(list(sizes), mine)
        if mine:
            self._files[mine_in] = (self._copied(weights), {"format": "pt"})

    def _copied(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        self._copies.append(self._memory.copied(list(tensors.values())))
        return dict(zip(tensors, self._copies[-1].tensors, strict=True))

    def add_state(self, parts: list[StatePart], step: int) -> None:
        """Copy this rank's optimizer state, after so many updates, to be written."""
        tensors = {f"{kind}/{piece.name}": values for kind, piece, values in parts}
        starts = {piece.name: piece.start for _, piece, _ in parts}
        world_size = dist.get_world_size()
        metadata = {"world_size": world_size, "step": step, "starts": starts}
        name = f"optimizer-{dist.get_rank():05d}-of-{world_size:05d}.safetensors"
        self._files[name] = (self._copied(tensors), {"state": json.dumps(metadata)})

    def write(self) -> list[str]:
        """Write this rank's files, without a collective; return their names."""
        for copies in self._copies:
            copies.wait()
        for name, (tensors, metadata) in self._files.items():
            save_file(tensors, self._directory / name, metadata)
            open_to_readers(self._directory / name)
        for copies in self._copies:
            copies.release()
        return sorted(self._files)

    def seal(self) -> list[str]:
        """Write the index of the weights on rank 0, if they are in several files."""
        if dist.get_rank() != 0 or MODEL_WEIGHTS in self._weight_map.values():
            return []
        index = {"metadata": {}, "weight_map": dict(sorted(self._weight_map.items()))}
        write_json(self._directory / MODEL_INDEX, index)
        return [MODEL_INDEX]


@torch.no_grad()
def read_state(directory: Path, parts: list[StatePart]) -> int:
    """Fill the parts from a checkpoint; return the updates counted.

    A slot that the checkpoint does not hold stays as it is: a branch may have averages that its
    parent did not.

    Raises:
        UserError: files are missing or do not fit the model.
    """
    with ExitStack() as stack:
        paths = sorted(directory.glob("optimizer-*.safetensors"))
        files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        headers = [json.loads(file.metadata()["state"]) for file in files]
        if not headers or len(headers) != headers[0]["world_size"]:
            raise UserError(
                f"{directory} holds {len(paths)} files of optimizer state, not one of every rank;"
                " restore the others"
            )

        # By key: the file of every rank with a range of it, and where the range starts.
        ranges: dict[str, list[tuple[Any, int]]] = {}
        for file, header in zip(files, headers, strict=True):
            for key in file.keys():  # noqa: SIM118  it is not a dictionary
                start = header["starts"][key.partition("/")[2]]
                ranges.setdefault(key, []).append((file.get_slice(key), start))

        # This rank's ranges need not be those of any rank that wrote.
        present = {key.partition("/")[0] for key in ranges}
        for kind, piece, out in parts:
            if kind.startswith("slot.") and kind not in present:
                continue
            key = f"{kind}/{piece.name}"
            if not _fill(out, piece, ranges.get(key, [])):
                raise UserError(
                    f"{directory} does not fit the model of run.json ({key}); restore the"
                    " run.json it was saved with"
                )
        return int(headers[0]["step"])


def _fill(out: Tensor, piece: ParameterRange, ranges: list[tuple[Any, int]]) -> bool:
    """Fill `out` [piece.length] from ranges of its parameter; return whether they suffice."""
    filled = 0
    for part, start in ranges:
        first = max(piece.start, start)
        stop = min(piece.start + piece.length, start + part.get_shape()[0])
        if first < stop:
            # A slice reads only these elements from the file.
            values = part[first - start : stop - start]
            out[first - piece.start : stop - piece.start] = values.to(out.device)
            filled += stop - first
    # Ranges of different ranks are disjoint, so their lengths add up to the whole.
    return filled == piece.length
