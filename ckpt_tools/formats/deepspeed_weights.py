"""The weights of a DeepSpeed checkpoint of any stage and world size by the row: `train.deepspeed.checkpoint` writes it.

As trained they lie in `model.safetensors` under HF names, whole. The fp32 main weights lie in the ranks' files, each a
range of the flattened weight.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ckpt_tools.formats.hf_weights import HFWeights, read_header
from ckpt_tools.formats.weights import Described, FileTensor
from train.command import UserError
from train.families import parameter_shapes
from train.settings import ModelConfig

MAIN = "weights"


class TrainedWeights(HFWeights):
    """The weights that the model computed with, of a hash-checked checkpoint.

    Raises:
        UserError: a key, a shape or a dtype of the files is not the model's, or a key is missing.
    """

    def __init__(self, checkpoint: Path, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__(checkpoint)
        next_action = f"{checkpoint} is no checkpoint of the model in its checkpoint.json; give another"
        shapes = parameter_shapes(model)
        differing = sorted(self.stored.keys() ^ shapes.keys())
        if differing:
            problem = "unknown" if differing[0] in self.stored else "missing"
            raise UserError(f"{problem} key '{differing[0]}' in the weights: {next_action}")
        for name, shape in shapes.items():
            found = self.stored[name]
            if (found.shape, found.dtype) != (shape, dtype):
                raise UserError(
                    f"'{name}' is {found.dtype} {found.shape}, the model needs {dtype} {shape}: {next_action}"
                )
        self.stored = {name: self.stored[name] for name in shapes}


class _Range(NamedTuple):
    """Numbers [start, stop) of a flattened tensor."""

    start: int
    stop: int
    flat: FileTensor


class RankState:
    """The optimizer state of all ranks of a hash-checked checkpoint: fp32, by kind and HF name.

    Attributes:
        header: stage, world_size and step, the updates that AdamW had counted.
        kinds: weights, exp_avg, exp_avg_sq, and slots where there are any; empty for weights alone.

    Raises:
        UserError: files are missing, of several saves, or their ranges do not cover every tensor exactly.
    """

    def __init__(self, checkpoint: Path, model: ModelConfig) -> None:
        self.shapes = parameter_shapes(model)
        self.header: dict[str, int] = {}
        self._ranges: dict[tuple[str, str], list[_Range]] = defaultdict(list)
        damaged = f"{checkpoint} holds no whole optimizer state of its model; give another checkpoint"
        paths = sorted(checkpoint.glob("optimizer-*.safetensors"))
        for path in paths:
            tensors = read_header(path)
            with safe_open(path, "pt") as file:
                header = json.loads(file.metadata()["state"])
            starts = header.pop("starts")
            if header != (self.header or header) or header["world_size"] != len(paths):
                raise UserError(damaged)
            self.header = header
            for key, flat in tensors.items():
                kind, _, name = key.partition("/")
                start = starts[name]
                self._ranges[kind, name].append(_Range(start, start + flat.shape[0], flat))
        self.kinds = tuple(dict.fromkeys(kind for kind, _ in self._ranges))
        for ranges in self._ranges.values():
            ranges.sort(key=lambda part: part.start)
        for kind in self.kinds:
            for name, shape in self.shapes.items():
                ranges = self._ranges[kind, name]
                ends = [0, *(part.stop for part in ranges)]
                if [part.start for part in ranges] != ends[:-1] or ends[-1] != torch.Size(shape).numel():
                    raise UserError(f"'{kind}/{name}': {damaged}")
        if len(self._ranges) != len(self.kinds) * len(self.shapes):
            unknown = next(name for _, name in self._ranges if name not in self.shapes)
            raise UserError(f"unknown key '{unknown}': {damaged}")

    def read(self, kind: str, name: str, start: int, stop: int) -> Tensor:
        """Numbers [start, stop) of a flattened tensor."""
        flat = torch.empty(stop - start)
        for part in self._ranges[kind, name]:
            begin, end = max(start, part.start), min(stop, part.stop)
            if begin < end:
                part.flat.read_into(flat[begin - start : end - start], begin - part.start)
        return flat


class MainWeights:
    """The fp32 weights that the optimizer of a hash-checked checkpoint goes on from.

    Raises:
        UserError: the checkpoint holds none, or not those of the model.
    """

    def __init__(self, checkpoint: Path, model: ModelConfig) -> None:
        self._state = RankState(checkpoint, model)
        if MAIN not in self._state.kinds:
            raise UserError(f"{checkpoint} holds no fp32 main weights; export it without --weights main")

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Every HF tensor, in the order of the model."""
        return {name: Described(shape, torch.float32) for name, shape in self._state.shapes.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor."""
        inner = self._state.shapes[name][1:]
        width = torch.Size(inner).numel()
        return self._state.read(MAIN, name, start * width, stop * width).view(stop - start, *inner)
