"""Reader of DeepSpeed checkpoints of any stage and world size, by the row.

`train.deepspeed.checkpoint` writes them: `model.safetensors` holds the weights as trained, whole
and by HF name. The fp32 main weights are in the ranks' files, each a range of a flattened weight.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from base.errors import UserError
from ckpt_tools.formats.hf_weights import HFWeights, read_header
from ckpt_tools.formats.weights import Described, FileTensor
from train.model.config import ModelConfig
from train.model.families import parameter_shapes

MAIN = "weights/"  # begins the keys of the main weights in a rank's file


class TrainedWeights(HFWeights):
    """The weights that the model computed with, of a hash-checked checkpoint.

    Raises:
        UserError: a key, a shape or a dtype of the files is not the model's, or a key is missing.
    """

    def __init__(self, checkpoint: Path, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(checkpoint)
        next_action = (
            f"{checkpoint} is no checkpoint of the model in its checkpoint.json; give another"
        )
        shapes = parameter_shapes(model)
        differing = sorted(self.stored.keys() ^ shapes.keys())
        if differing:
            problem = "unknown" if differing[0] in self.stored else "missing"
            raise UserError(f"{problem} key '{differing[0]}' in the weights: {next_action}")
        for name, shape in shapes.items():
            tensor = self.stored[name]
            if (tensor.shape, tensor.dtype) != (shape, dtype):
                raise UserError(
                    f"'{name}' is {tensor.dtype} {tensor.shape}, the model needs {dtype} {shape}:"
                    f" {next_action}"
                )
        self.stored = {name: self.stored[name] for name in shapes}


class _Range(NamedTuple):
    """Numbers [start, stop) of a flattened weight."""

    start: int
    stop: int
    flat: FileTensor


class MainWeights:
    """The fp32 weights that the optimizer of a hash-checked checkpoint continues from.

    Raises:
        UserError: there are none, files are missing or of several saves, or their ranges do not
            cover every weight exactly.
    """

    def __init__(self, checkpoint: Path, model: ModelConfig) -> None:
        self._shapes = parameter_shapes(model)
        self._ranges = _ranges(checkpoint)
        damaged = (
            f"{checkpoint} holds no whole optimizer state of its model; give another checkpoint"
        )
        if not self._ranges:
            raise UserError(
                f"{checkpoint} holds no fp32 main weights; export it without --weights main"
            )
        for name in sorted(self._ranges.keys() ^ self._shapes.keys()):
            problem = "unknown" if name in self._ranges else "missing"
            raise UserError(f"{problem} key '{MAIN}{name}': {damaged}")
        for name, shape in self._shapes.items():
            starts = [part.start for part in self._ranges[name]]
            ends = [part.stop for part in self._ranges[name]]
            # Each range begins where the one before it ended, and the last ends with the weight.
            if [*starts, torch.Size(shape).numel()] != [0, *ends]:
                raise UserError(f"'{MAIN}{name}': {damaged}")

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Shape and type of every HF tensor, in the order of the model."""
        return {name: Described(shape, torch.float32) for name, shape in self._shapes.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor."""
        inner = self._shapes[name][1:]
        width = torch.Size(inner).numel()
        first, last = start * width, stop * width
        flat = torch.empty(last - first)
        for part in self._ranges[name]:
            begin, end = max(first, part.start), min(last, part.stop)
            if begin < end:
                part.flat.read_into(flat[begin - first : end - first], begin - part.start)
        return flat.view(stop - start, *inner)


def _ranges(checkpoint: Path) -> dict[str, list[_Range]]:
    """Return the ranges of every main weight in order, from the files of all ranks."""
    ranges: dict[str, list[_Range]] = defaultdict(list)
    headers = []
    paths = sorted(checkpoint.glob("optimizer-*.safetensors"))
    for path in paths:
        tensors = read_header(path)
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["state"])
        starts = header.pop("starts")
        headers.append(header)
        if header != headers[0] or header["world_size"] != len(paths):
            raise UserError(
                f"{checkpoint} holds no whole optimizer state of its model; give another checkpoint"
            )
        for key, flat in tensors.items():
            if key.startswith(MAIN):
                name = key.removeprefix(MAIN)
                ranges[name].append(_Range(starts[name], starts[name] + flat.shape[0], flat))
    return {name: sorted(parts, key=lambda part: part.start) for name, parts in ranges.items()}
