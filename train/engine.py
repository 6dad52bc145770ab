"""The verbs an engine gives to the training loop. The loop says what happens, an engine how."""

import math
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor

from train.config import RunConfig


class StepResult(NamedTuple):
    """One update, over all ranks."""

    loss: float  # mean cross-entropy of the batch before the update, nats per token
    z_loss: float  # mean z-loss, already multiplied by its coefficient
    grad_norm: float  # L2 norm of the whole gradient before clipping

    def is_finite(self) -> bool:
        """Whether nothing overflowed."""
        return all(math.isfinite(value) for value in self)


class Engine(Protocol):
    """One rank of a run. Every rank calls every method; results are global and the same on all ranks."""

    @property
    def layout(self) -> dict[str, int]:
        """Parallel sizes by name."""
        ...

    def train_step(self, sequences_BS: Tensor, learning_rate: float) -> StepResult:
        """Forward, backward, clip and update on one global batch [B, S + 1]."""
        ...

    def evaluate(self, sequences_BS: Tensor) -> float:
        """Mean cross-entropy of the sequences [B, S + 1], nats per token."""
        ...

    def logits(self, inputs_BS: Tensor) -> Tensor:
        """Logits [B, S, V] in fp32, on every rank, on the CPU."""
        ...

    def save(self, directory: Path) -> None:
        """Writes weights and optimizer state as shards."""
        ...

    def load(self, directory: Path) -> None:
        """Loads what `save` wrote, at any layout."""
        ...

    def close(self) -> None:
        """Leaves the process groups."""
        ...


def build_engine(run: RunConfig) -> Engine:
    """The engine that run.json names. Imported here so that nothing else needs it installed."""
    from train.megatron.engine import MegatronEngine

    return MegatronEngine(run)
