"""The hidden matrices of the megatron engine for `train.muon`.

Queries, keys, values, gate and up are orthogonalised one by one, as HF and OLMo2 have them: the
matrix in which they are fused here is a matter of layout, and a tensor rank's shard even more so.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from train import muon
from train.megatron.model import PARAMETER_DTYPE, global_parameters
from train.megatron.optimizer_state import OptimizerState
from train.model import megatron_names
from train.model.families import hidden_matrices
from train.run.config import RunConfig


def register(run: RunConfig, model: Any, state: OptimizerState) -> None:
    """Have Muon update the hidden matrices of this stage."""
    hidden = hidden_matrices(run.model)
    names = {parameter: name for name, parameter in global_parameters(model).items()}
    parts = [
        muon.Part(
            piece.inner,
            slice(0, piece.inner.numel()),
            piece.owner,
            piece.ranks,
            _Matrix(run, names[piece.parameter], piece.parameter.shape),
        )
        for piece in state.pieces
        if hidden.issuperset(megatron_names.hf_names(names[piece.parameter]))
    ]
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    muon.register(state.inner_optimizer, parts, group)


class _Matrix:
    """The orthogonalisation of a megatron tensor from its shard on this rank."""

    def __init__(self, run: RunConfig, name: str, shape: torch.Size) -> None:
        self._run, self._name, self._shape = run, name, shape

    def __call__(self, flat: Tensor) -> Tensor:
        """Return the update of the shard, flat; all tensor ranks call and compute the same."""
        size = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        shards = [torch.empty_like(flat) for _ in range(size)] if size > 1 else [flat]
        if size > 1:
            dist.all_gather(shards, flat, parallel_state.get_tensor_model_parallel_group())
        matrix = megatron_names.unshard(self._name, [shard.view(self._shape) for shard in shards])

        dtype = PARAMETER_DTYPE[self._run.precision]
        for rows in megatron_names.hf_rows(self._name, self._run.model).values():
            index = torch.cat([torch.arange(*span, device=flat.device) for span in rows])
            matrix[index] = muon.orthogonalized(matrix[index], dtype)
        return megatron_names.shard(self._name, matrix, rank, size).flatten()
