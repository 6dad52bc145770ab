"""The verbs an engine gives to the training loop. The loop says what happens, an engine how.

Shapes: B sequences, S tokens, V vocabulary.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from train.config import RunConfig


class Batch(NamedTuple):
    """What one update, or one held-out loss, is computed on."""

    tokens_BS: Tensor  # int64 [B, S + 1]: inputs are [:, :-1], labels [:, 1:]
    counted_BS: Tensor  # bool [B, S]: the labels that enter the loss
    documents_BS: Tensor | None = None  # int64 [B, S]: each input's document in its sequence; None: attention crosses

    @staticmethod
    def of(tokens_BS: Tensor) -> "Batch":
        """A batch in which every label counts."""
        return Batch(tokens_BS, torch.ones(len(tokens_BS), tokens_BS.shape[1] - 1, dtype=torch.bool))

    def microbatches(
        self, size: int, *, rank: int, ranks: int, device: torch.device, multiple_of: int = 1
    ) -> list["Batch"]:
        """What one data-parallel rank computes: of every `ranks` consecutive microbatches the one of its rank.

        Where the sequences do not suffice the first is repeated, and counts nowhere.

        Args:
            size: sequences of a microbatch.
            rank: of data parallelism.
            ranks: how many there are.
            device: where the microbatches are needed.
            multiple_of: what the number of microbatches has to be a multiple of.
        """
        count = len(self.tokens_BS)
        number = -(-count // (size * ranks))
        number += -number % multiple_of

        def share(whole: Tensor, filler: Tensor) -> Tensor:
            padded = torch.cat([whole, filler.expand(number * ranks * size - count, -1)])
            mine: Tensor = padded.unflatten(0, (number, ranks, size))[:, rank]  # type: ignore[no-untyped-call]
            return mine.to(device)

        tokens = share(self.tokens_BS, self.tokens_BS[:1])
        counted = share(self.counted_BS, torch.zeros_like(self.counted_BS[:1]))
        if self.documents_BS is None:
            return [Batch(*parts) for parts in zip(tokens, counted, strict=True)]
        documents = share(self.documents_BS, self.documents_BS[:1])
        return [Batch(*parts) for parts in zip(tokens, counted, documents, strict=True)]


class StepResult(NamedTuple):
    """One update, over all ranks.

    What is minimised is the sum of both losses over counted labels divided by ALL B x S positions, as OLMo does: a
    sequence that is filtered out weakens the gradient and strengthens no other. What is reported is per counted label.
    """

    loss: float  # mean cross-entropy of the batch before the update, nats per token
    z_loss: float  # mean z-loss, already multiplied by its coefficient
    grad_norm: float  # L2 norm of the whole gradient before clipping

    def is_finite(self) -> bool:
        """Whether nothing overflowed."""
        return all(math.isfinite(value) for value in self)


class WeightShard(NamedTuple):
    """A part of the fp32 main weights that this rank holds."""

    decayed: bool  # whether weight decay applies to it
    weights: Tensor  # fp32, flat, live: writing to it changes what the optimizer goes on from
    counted: bool  # over all ranks every element is counted exactly once; False on further copies


class Snapshot(Protocol):
    """The state of one step, copied: training may go on while it is written."""

    def write(self) -> list[str]:
        """Writes and syncs this rank's part; calls no collective, so it may run in a thread. Names of its files."""
        ...

    def seal(self) -> list[str]:
        """After every rank has written, called by every rank: writes what is common. Names of the files written."""
        ...


class Engine(Protocol):
    """One rank of a run. Every rank calls every method; results are global and the same on all ranks."""

    @property
    def layout(self) -> dict[str, int]:
        """Parallel sizes by name: tensor, pipeline, data, ..."""
        ...

    def train_step(self, batch: Batch, learning_rate: float, accept: Callable[[StepResult], bool]) -> StepResult:
        """Forward, backward, then, if `accept` says so on seeing losses and gradient norm, clip and update.

        A rejected step leaves weights and optimizer state bit for bit as they were. All ranks decide alike.
        """
        ...

    def evaluate(self, batch: Batch) -> float:
        """Mean cross-entropy over the counted labels, nats per token."""
        ...

    def probe(self, inputs_BS: Tensor) -> dict[str, Tensor]:
        """What the model puts out for a few sequences, in fp32, on the CPU of rank 0; nothing on other ranks.

        Whole tensors at any layout, seen where the engine computes them, with HF's names for the modules:
        "logits" [B, S, V], "outputs/model.embed_tokens" [B, S, H], and [B, width] at each sequence's last token for
        every layer (the residual stream behind it) and every other module that has parameters of its own.
        """
        ...

    def weights(self) -> list[WeightShard]:
        """Part of the fp32 main weights that this rank holds."""
        ...

    def slot(self, name: str) -> list[Tensor]:
        """A named fp32 copy of the shape of `weights()`, zero at first, saved, resharded and loaded with them.

        The names are those of `train.averaging.slot_names(run)`.
        """
        ...

    def publish_weights(self) -> None:
        """Makes the model compute with what `weights()` now hold."""
        ...

    def snapshot(self, directory: Path, *, weights_only: bool) -> Snapshot:
        """Copies the model's weights and, unless `weights_only`, optimizer state and slots, to be written below."""
        ...

    def load(self, directory: Path) -> None:
        """Loads what a snapshot with optimizer state wrote, at any layout it supports; UserError at others."""
        ...

    def start_from(self, read: Callable[[str], Tensor]) -> None:
        """Takes over the weights that `read` gives by HF name, whole, exactly in fp32; for a new engine."""
        ...

    def close(self) -> None:
        """Leaves the process groups."""
        ...


def build_engine(run: RunConfig, device: torch.device) -> Engine:
    """The engine that run.json names. Imported here so that nothing else needs it installed."""
    if run.engine == "deepspeed":
        from train.deepspeed.engine import DeepSpeedEngine

        engine: Engine = DeepSpeedEngine(run, device)
        return engine
    from train.megatron.engine import MegatronEngine

    return MegatronEngine(run, device)
