"""The methods of an engine that the training loop calls.

`train.loop` calls them; `train.megatron.engine` and `train.deepspeed.engine` implement them.

Shapes: B sequences, S tokens, V vocabulary; O output features (rows), I input features.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from train.data.batches import Batch, Replica
from train.forward_record import ForwardRecord, LinearRecord


class StepResult(NamedTuple):
    """The figures of one update, over all ranks, per counted label.

    The minimised loss is the sum of loss and z-loss over counted labels, divided by ALL B x S
    positions as in OLMo: a sequence that is filtered out weakens the gradient and strengthens no
    other.
    """

    loss: float  # mean cross-entropy of the batch before the update, nats per token
    grad_norm: float  # L2 norm of the whole gradient before clipping
    # Whatever else the engine measures in a step, finite and by the name under which it is logged.
    metrics: Mapping[str, float]
    flags: Sequence[float] = ()  # sums over all ranks of what each gave the step

    @staticmethod
    def of(
        sums: Sequence[float], positions: int, grad_norm: float, **metrics: float
    ) -> "StepResult":
        """Return the result of a step.

        Args:
            sums: of cross-entropy, z-loss and number of counted labels, over all ranks; flags may
                follow.
            positions: all labels of the batch, counted or not.
            grad_norm: of the whole gradient.
            metrics: of this engine.
        """
        # A batch may count no label at all: its sums are 0 then, and so are its means.
        cross_entropy, z_loss, counted, *flags = sums
        common = {"z_loss": z_loss / max(counted, 1)}  # already multiplied by its coefficient
        if counted < positions:
            common["counted_fraction"] = counted / positions
        return StepResult(cross_entropy / max(counted, 1), grad_norm, common | metrics, flags)

    @staticmethod
    def joined(parts: Sequence["StepResult"]) -> "StepResult":
        """Return the result of a batch from those of its parts, each of as many positions.

        Norm and flags are those of the last part.
        """
        fractions = [part.metrics.get("counted_fraction", 1.0) for part in parts]
        counted = math.fsum(fractions)

        def mean(values: Iterable[float]) -> float:
            pairs = zip(values, fractions, strict=True)
            return sum(value * fraction for value, fraction in pairs) / (counted or 1.0)

        names = parts[-1].metrics.keys() - {"counted_fraction"}
        metrics = {name: mean(part.metrics[name] for part in parts) for name in sorted(names)}
        if counted < len(parts):
            metrics["counted_fraction"] = counted / len(parts)
        return parts[-1]._replace(loss=mean(part.loss for part in parts), metrics=metrics)

    @property
    def figures(self) -> dict[str, float]:
        """Return all figures by the name under which they are logged."""
        return {"loss": self.loss, "grad_norm": self.grad_norm, **self.metrics}

    def is_finite(self) -> bool:
        """Return whether nothing overflowed."""
        return all(map(math.isfinite, self.figures.values()))


Accept = Callable[[StepResult], bool]
Flags = Callable[[], Sequence[float]]
Revise = Callable[[list[Tensor]], None]


class LinearPart(NamedTuple):
    """A rank's part of a linear of the blocks, whose weight the model computes with.

    Attributes:
        name: HF name of its weight.
        pieces: live [O_i, I], consecutive rows of it; an engine may keep other weights' between.
        row, column: of its first number in the whole weight.
        ranks: that have its parts, all along the one axis, in their order; None: this rank has all.
    """

    name: str
    pieces: tuple[Tensor, ...]
    row: int = 0
    column: int = 0
    ranks: ProcessGroup | None = None

    def copy_(self, weight_OI: Tensor) -> None:
        """Write this rank's part of the weight."""
        rows = [len(piece) for piece in self.pieces]
        for piece, values in zip(self.pieces, weight_OI.split(rows), strict=True):
            piece.copy_(values)


class Snapshot(Protocol):
    """A copy of the state of one step: training may continue while it is written."""

    def write(self) -> list[str]:
        """Write this rank's files, perhaps in a thread: no collective. Return names."""
        ...

    def seal(self) -> list[str]:
        """Write the common files, once every rank has written; every rank calls. Return names."""
        ...


# Returns the weight [O, I] that replaces the one given, or None to leave it.
Change = Callable[[LinearPart, Tensor], Tensor | None]


@torch.no_grad()
def change_in_place(linears: Iterable[LinearPart], change: Change) -> Callable[[], None]:
    """Replace live weights by what `change` returns; return what restores them bit for bit."""
    exact: list[tuple[LinearPart, Tensor]] = []
    for linear in linears:
        weight_OI = torch.cat(linear.pieces)
        changed_OI = change(linear, weight_OI)
        if changed_OI is not None:
            exact.append((linear, weight_OI))
            linear.copy_(changed_OI)

    def restore() -> None:
        for linear, weight_OI in exact:
            linear.copy_(weight_OI)

    return restore


class Engine(Protocol):
    """One rank of a run. Every rank calls every method; results are global, equal on all ranks."""

    @property
    def replica(self) -> Replica:
        """Return the data-parallel replica that this rank is a part of."""
        ...

    @property
    def layout(self) -> dict[str, int]:
        """Return parallel sizes by name: tensor, pipeline, data, ..."""
        ...

    @property
    def kernels(self) -> dict[str, str]:
        """Return what computes attention and the gradients of weights, for environment.json."""
        ...

    def train_step(
        self,
        batch: Batch,
        learning_rate: float,
        accept: Accept,
        flags: Flags = tuple,
        revise: Revise | None = None,
    ) -> StepResult:
        """Run forward and backward; if `accept` takes losses and norm, clip and update.

        The batch is that of this rank's replica.
        A rejected step leaves weights and optimizer state bit for bit as they were. All ranks
        decide alike. `flags` is called once, when forward and backward are dispatched: its numbers
        are summed over all ranks by the reduction of the losses, into the result. `revise` may
        write to `gradients()`, which it is given, before their norm is taken.
        """
        ...

    def evaluate(self, batch: Batch) -> float:
        """Return the mean cross-entropy over the counted labels, nats per token.

        The batch is that of this rank's replica.
        """
        ...

    def probe(self, inputs_BS: Tensor) -> dict[str, Tensor]:
        """Return outputs for a few sequences, fp32, on the CPU of rank 0; {} elsewhere.

        The tensors are whole at any layout, recorded where the engine computes them, by HF's names
        of the modules: "logits" [B, S, V], "outputs/model.embed_tokens" [B, S, H], and [B, width]
        at each sequence's last token for every layer (the residual stream after it) and every
        other module with parameters of its own.
        """
        ...

    def weights(self) -> list[Tensor]:
        """Return the fp32 main weights of this rank, flat and live.

        The optimizer continues from what is written to them. Ask again after a snapshot, which may
        be copying them still: what the GPU computes after the call waits for it.
        """
        ...

    def gradients(self) -> list[Tensor]:
        """Return the gradient of `weights()` before clipping; only while `accept` is asked."""
        ...

    def by_parameter(self, values: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield an HF name and this rank's part for each parameter, of values like `weights()`.

        A part that several ranks hold is yielded by one of them. A matrix that the engine fuses has
        the name of its first part.
        """
        ...

    def record_forward(self, batch: Batch) -> ForwardRecord:
        """Return figures of this rank's layers in a forward pass of a few sequences.

        All ranks give the same batch.
        """
        ...

    def linears(self) -> Iterable[LinearPart]:
        """Return the weights of the blocks' linears that the model computes with, to be read.

        This rank's rows or columns of each. ZeRO stage 3 gathers each as it is asked for: all ranks
        ask for all of them.
        """
        ...

    def change_linears(self, change: Change) -> Callable[[], None]:
        """Have the model compute with changed weights; return what restores them, bit for bit.

        `change` is asked for every linear of `linears()`. All ranks call both. The weights may
        share memory with the main ones: they are restored at the latest when `accept` is asked.
        """
        ...

    def record_linears(self, batch: Batch, names: Sequence[str]) -> dict[str, LinearRecord]:
        """Return the inputs of some linears in a forward pass of a few sequences, by weight.

        They are among `families.residual_linears`. All ranks give the same batch; the first replica
        computes, and one rank returns each linear.
        """
        ...

    def slot(self, name: str) -> list[Tensor]:
        """Return a named fp32 copy of the shape of `weights()`: the memory of an average.

        Slots are zero at first, and saved, resharded and loaded with the weights. Their names are
        `train.averages.slot_names(run)`.
        """
        ...

    def publish_weights(self) -> None:
        """Make the model compute with the current `weights()`."""
        ...

    def snapshot(self, directory: Path, *, weights_only: bool) -> Snapshot:
        """Copy the weights and, unless `weights_only`, optimizer state and slots.

        The copy is written to `directory`, which need not exist yet.
        """
        ...

    def load(self, directory: Path) -> None:
        """Load a snapshot with optimizer state; UserError where this layout cannot."""
        ...

    def start_from(self, read: Callable[[str], Tensor]) -> None:
        """Set the weights to those that `read` gives by HF name, whole, in fp32.

        A new engine has none: it starts from some, or loads.
        """
        ...

    def close(self) -> None:
        """Destroy the process groups."""
        ...
