"""The output layer of megatron-core with both losses of `train.model.losses`.

Shapes: S tokens, B sequences, H hidden size, V rows of the vocabulary on this rank.
"""

from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from train.model.losses import Targets, head_losses


class Head(ColumnParallelLinear):
    """The output layer, which returns losses where it is given labels.

    They are computed in its forward pass because mcore waits there for weights still on their way.
    """

    def forward(  # type: ignore[override]
        self, hidden_SBH: Tensor, targets: Targets | None = None, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return logits [S, B, V] and no bias; with targets, what `head_losses` returns.

        The weight is given where it is the embedding's, which the same stage has.
        """
        if targets is None:
            logits: tuple[Tensor, None] = super().forward(hidden_SBH, weight)
            return logits
        weight = self.weight if weight is None else weight
        if self.sequence_parallel:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH)
        elif self.allreduce_dgrad:
            hidden_SBH = copy_to_tensor_model_parallel_region(hidden_SBH)
        group = parallel_state.get_tensor_model_parallel_group()
        return head_losses(
            hidden_SBH.flatten(0, 1),
            weight,
            targets,
            group if group.size() > 1 else None,
        )
