"""Norms by layer, the largest attention logits and outliers, at the steps that a run asks for.

`train.loop` calls `observed_step` in place of the engine's, and `forward_figures` after it.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from base.grouping import grouped
from train.data.batches import Batch
from train.distributed import gathered
from train.engine import Accept, Engine, Flags, StepResult
from train.perturbing import TrainStep


def observed_step(
    engine: Engine,
    train_step: TrainStep,
    batch: Batch,
    learning_rate: float,
    accept: Accept,
    flags: Flags = tuple,
) -> tuple[StepResult, dict[str, float]]:
    """Run a `train_step` of the engine; return also L2 norms by layer, and outside the layers.

    The keys are weight_norm (after the update), gradient_norm (before clipping) and update_norm (of
    the difference that the update made, decay included), each with /layers.3 or /lm_head.
    """
    squares: dict[str, float] = defaultdict(float)
    before: list[Tensor] = []

    def add(kind: str, values: list[Tensor]) -> None:
        for name, value in engine.by_parameter(values):
            norm = torch.linalg.vector_norm(value, dtype=torch.float64).item()
            # Squares add up over parameters and ranks; the root is taken at the end.
            squares[f"{kind}/{_part(name)}"] += norm**2

    def observe(result: StepResult) -> bool:
        """Look at the gradient where it is whole and not yet clipped."""
        add("gradient_norm", engine.gradients())
        # Clipping, decay and the optimizer are all in the difference from these weights.
        before.extend(weights.to("cpu", copy=True) for weights in engine.weights())
        return accept(result)

    result = train_step(batch, learning_rate, observe, flags)
    add("weight_norm", engine.weights())
    add(
        "update_norm",
        [
            weights - previous.to(weights.device)
            for weights, previous in zip(engine.weights(), before, strict=True)
        ],
    )
    totals = _summed(gathered(squares))
    return result, {key: math.sqrt(total) for key, total in totals.items()}


def _summed(dictionaries: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for dictionary in dictionaries:
        for key, value in dictionary.items():
            totals[key] += value
    return totals


def _part(name: str) -> str:
    """Return the part of the model of an HF name: 'layers.3', 'embed_tokens', 'norm', 'lm_head'."""
    layer = re.search(r"layers\.\d+", name)
    return layer[0] if layer else name.split(".")[-2]


def forward_figures(engine: Engine, batch: Batch) -> dict[str, float]:
    """Return the figures of a forward pass that the engine's hooks recorded, by name.

    Every rank gives the same sequences, so ranks that share a layer add equal or disjoint parts.
    """
    records = gathered(engine.record_forward(batch))
    squares = _summed(record.squares for record in records)
    elements = _summed(record.elements for record in records)
    figures = {name: math.sqrt(squares[name] / elements[name]) for name in squares}
    for record in records:
        for name, value in record.maxima.items():
            figures[name] = max(value, figures.get(name, -math.inf))
    # Ranks that share a linear have the same of it.
    values = {name: value for record in records for name, value in record.values.items()}
    return figures | values | _means(values)


def _means(values: Mapping[str, float]) -> dict[str, float]:
    """Return the mean over linears of each of their figures, KIND/FIGURE/LINEAR, by KIND/FIGURE."""
    by_figure = grouped(values.items(), lambda item: item[0].rpartition("/")[0])
    return {
        figure: sum(value for _, value in items) / len(items) for figure, items in by_figure.items()
    }
