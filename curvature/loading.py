"""Weights read where they are needed: each rank reads its own rows of its own parameters.

`subject.py` calls this: a model of empty tensors is put on its ranks first and filled after that,
so that no process holds a whole model of which it needs a part.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import read_whole
from ckpt_tools.hf.forward import check_shapes, empty_model, names_in_files
from curvature.products.parameters import Parameters, copy, local

BYTES_AT_ONCE = 1 << 28  # of a file, in memory


class WeightFiles:
    """The weights of an HF directory, by the names of the model's parameters.

    Raises:
        UserError: keys or shapes are not those of config.json, or a file is damaged.
    """

    def __init__(self, hf_dir: Path, config: PretrainedConfig) -> None:
        self._config, self._weights = config, HFWeights(hf_dir)
        without_content = empty_model(config)
        check_shapes(without_content, self._weights, hf_dir)
        self._files = names_in_files(without_content)

    @torch.no_grad()
    def empty(self, device: torch.device) -> PreTrainedModel:
        """Return the model in fp32 with its constants, and with parameters to be filled.

        On a CPU these take no memory until something is written to them.
        """
        model = empty_model(self._config)
        parameters: dict[Tensor, nn.Parameter] = {}  # one for both places of a tied parameter
        for module in model.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                if weight not in parameters:
                    parameters[weight] = nn.Parameter(torch.empty_like(weight, device=device))
                module.register_parameter(name, parameters[weight])
        for name, constant in model.named_buffers():
            if name in self._files:
                constant.copy_(read_whole(self._weights, self._files[name]).view_as(constant))
        model.to(device)  # type: ignore[arg-type]
        return model

    @torch.no_grad()
    def fill(self, parameters: Parameters) -> None:
        """Read this rank's rows of every parameter."""
        for name, weight in parameters.weights.items():
            file, row = self._files[name], parameters.first_row(name)
            rows_at_once = max(1, BYTES_AT_ONCE // self._weights.tensors[file].row_bytes)
            rank_rows = local(weight.detach())
            for rows in (rank_rows if rank_rows.dim() else rank_rows.view(1)).split(rows_at_once):
                copy(rows, self._weights.read(file, row, row + len(rows)))
                row += len(rows)
