"""HF weights as megatron keeps them: fused matrices by global name, and the state of an optimizer before it begins."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ckpt_tools.formats.megatron_shards import MAIN, MOMENTS, OPTIMIZER, optimizer_part
from ckpt_tools.formats.weights import Described, Weights
from train import layout
from train.settings import ModelConfig


class FusedWeights:
    """The weights of an OLMo2 by global megatron name: `ckpt_tools.formats.megatron_shards.MegatronWeights` backwards.

    Args:
        weights: by HF name, all of one type.
        model: their architecture.
        optimizer_state: with fp32 main weights and moments that are zero.
    """

    def __init__(self, weights: Weights, model: ModelConfig, *, optimizer_state: bool) -> None:
        self._weights = weights
        names = layout.megatron_names(model.num_hidden_layers)
        dtype = next(iter(weights.tensors.values())).dtype
        self._rows = {name: layout.hf_rows(name, model) for name in names}
        self._tensors = {name: Described(layout.whole_shape(name, model), dtype) for name in names}
        for part in (MAIN, *MOMENTS) if optimizer_state else ():
            for name in names:
                self._tensors[f"{OPTIMIZER}{part}.{name}"] = Described(self._tensors[name].shape, torch.float32)

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Every tensor, weights first."""
        return self._tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, put together from the HF tensors that it fuses."""
        shape, dtype = self._tensors[name]
        part, weight = optimizer_part(name, self._rows) or ("", name)
        rows = torch.zeros((stop - start, *shape[1:]), dtype=dtype)
        for hf_name, spans in self._rows[weight].items() if part not in MOMENTS else ():
            before = 0  # rows of the HF tensor in the spans so far
            for first, last in spans:
                begin, end = max(start, first), min(stop, last)
                if begin < end:
                    offset = before - first
                    rows[begin - start : end - start] = self._weights.read(hf_name, begin + offset, end + offset)
                before += last - first
        return rows
