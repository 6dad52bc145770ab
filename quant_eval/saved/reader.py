"""The weights of a saved checkpoint, unpacked one linear at a time."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from base.reading import read_object
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import Described, read_whole
from quant_eval.model.streamed import Block
from quant_eval.saved.formats import SETTINGS, read_format


class SavedWeights:
    """The weights of a saved checkpoint by the HF names of the model that was quantized.

    A packed linear is unpacked in fp32 and rounded to `dtype` once; one is held at a time.

    Attributes:
        tensors: shapes and types of the dense weights, in the order of the files.
    """

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        config = read_object(directory / "config.json")
        self._format = read_format(config[SETTINGS])
        self._dtype, self._files = dtype, HFWeights(directory)
        stored = self._files.tensors

        # tensors of each packed linear, by their last names
        self._parts: dict[str, dict[str, str]] = {
            name.rpartition(".")[0]: {}
            for name in stored
            if name.endswith(f".{self._format.scales}")
        }
        tensors: dict[str, Described] = {}
        for name, described in stored.items():
            linear, _, last = name.rpartition(".")
            if linear in self._parts and last != "bias":
                self._parts[linear][last] = name
                tensors[f"{linear}.weight"] = described  # keeps the place; described below
            elif self._format.is_weight(name):
                tensors[name] = described
        for linear, parts in self._parts.items():
            shape = self._format.weight_shape({last: stored[name] for last, name in parts.items()})
            tensors[f"{linear}.weight"] = Described(shape, dtype)
        self.tensors: Mapping[str, Described] = tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a dense weight, contiguous."""
        linear, _, last = name.rpartition(".")
        if linear not in self._parts or last == "bias":
            return self._files.read(name, start, stop)
        parts = {
            key: read_whole(self._files, tensor) for key, tensor in self._parts[linear].items()
        }
        return self._format.dense(linear, parts)[start:stop].to(self._dtype)

    def restore(self, block: Block) -> None:
        """Let a block with these weights cast activations and cache as the checkpoint says."""
        self._format.restore(block, self._files)
