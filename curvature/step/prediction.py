"""The loss along a quantization step delta, and the step's curvature against a random one's.

L(theta + delta) - L(theta) = g.delta + 1/2 delta'H delta + R, of the step as a whole and of every
decoder block's part of it alone. R, what is measured beyond the second order, is of third order in
delta.

The curvature along the step, delta'H delta / |delta|^2, exceeds the mean curvature tr H / N of the
same N weights for two reasons, separated by the step with random signs s, E[(s delta)'H(s delta)]
= sum_i h_ii delta_i^2: larger steps where the diagonal is large, and errors that add up because H
couples them.

All figures of a microbatch belong to the same tokens, so differences and ratios are paired; the
microbatches are of one size and independent, and stand for the text.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from base.errors import UserError
from curvature.products.exact import Quadratic
from curvature.products.parameters import block_of
from curvature.trace.estimates import TRACE_UNIT, estimate_mean

Vector = dict[str, Tensor]

_NATS = "nats per token"
UNITS = {
    "loss": f"{_NATS}, before the step",
    "norm": "parameter units, |delta|",
    "parameters": "entries of the tensors that differ",
    "first_order": f"{_NATS}, g.delta",
    "second_order": f"{_NATS}, delta'H delta / 2",
    "predicted": f"{_NATS}, first_order + second_order",
    "measured": f"{_NATS}, loss after the step minus loss before it",
    "remainder": f"{_NATS}, measured - predicted",
    "relative_difference": "1 (predicted / measured - 1)",
    "curvature.along_step": f"{TRACE_UNIT}, delta'H delta / |delta|^2",
    "curvature.signed": (
        f"{TRACE_UNIT}, the same with random signs: sum_i h_ii delta_i^2 / |delta|^2"
    ),
    "curvature.mean": f"{TRACE_UNIT}, tr H / N over the tensors that differ",
    "ratios.step_to_mean": "1 (along_step / mean)",
    "ratios.step_to_signed": "1 (along_step / signed)",
    "ratios.signed_to_mean": "1 (signed / mean)",
    "interaction.second_order": f"{_NATS}, of the whole step minus the sum over blocks",
    "interaction.measured": f"{_NATS}, of the whole step minus the sum over blocks",
    "interaction.share": "1 (interaction.second_order / second_order)",
    "per_microbatch": f"{_NATS}, in the order of the microbatches",
}


INCREASE = ("first_order", "second_order", "predicted", "measured", "remainder")
CURVATURE = ("along_step", "signed", "mean")


class _Part:
    """The whole step, or a block's part of it, and by figure a value of each microbatch."""

    def __init__(self, label: str, moved: Vector) -> None:
        self.label, self.moved = label, moved
        self.square = math.fsum(float(tensor.double().square().sum()) for tensor in moved.values())
        self.size = sum(tensor.numel() for tensor in moved.values())
        self.values: dict[str, list[float]] = {figure: [] for figure in (*INCREASE, *CURVATURE)}

    def add(
        self,
        along: Quadratic,
        increase: float,
        signed: Mapping[str, float],
        probed: Mapping[str, float],
    ) -> None:
        """Add a microbatch: the product with the part, the measured increase, random signs."""
        curvature, with_signs, trace = (
            math.fsum(dots[name] for name in self.moved) for dots in (along.dots, signed, probed)
        )
        predicted = along.slope + curvature / 2
        row = {
            "first_order": along.slope,
            "second_order": curvature / 2,
            "predicted": predicted,
            "measured": increase,
            "remainder": increase - predicted,
            "along_step": curvature / self.square,
            "signed": with_signs / self.square,
            "mean": trace / self.size,
        }
        for figure, value in row.items():
            values = self.values[figure]
            if not math.isfinite(value):
                raise UserError(
                    f"microbatch {len(values)}: {figure} of the step in {self.label} is not finite;"
                    " give a checkpoint and quantized weights where it is"
                )
            values.append(value)

    def summary(self, level: float) -> dict[str, Any]:
        """Return means over the microbatches and their ratios."""
        values = self.values
        ratios = {
            "step_to_mean": ("along_step", "mean"),
            "step_to_signed": ("along_step", "signed"),
            "signed_to_mean": ("signed", "mean"),
        }
        # predicted / measured - 1 = -remainder / measured.
        excess = [-value for value in values["remainder"]]
        return {
            "norm": math.sqrt(self.square),
            "parameters": self.size,
            **{figure: _mean(values[figure], level) for figure in INCREASE},
            "relative_difference": _ratio(excess, values["measured"], level),
            "curvature": {figure: _mean(values[figure], level) for figure in CURVATURE},
            "ratios": {
                name: _ratio(values[above], values[below], level)
                for name, (above, below) in ratios.items()
            },
        }


def predict(
    evaluate: Callable[[int, Vector], Quadratic],
    loss_moved: Callable[[int, Vector], float],
    delta: Vector,
    random: Callable[[int], tuple[Vector, Mapping[str, float]]],
    *,
    microbatches: int,
    level: float = 0.95,
) -> dict[str, Any]:
    """Return predicted and measured loss increase of a step and of each block's part, for JSON.

    Every microbatch takes 2 + B products, besides that of `random`, and 2 + B losses, B blocks.
    Each figure is an `Estimate` over microbatches, its unit in `UNITS`; a ratio to 0 is None.

    Args:
        evaluate: loss, g.v and v_t'(Hv)_t by tensor of microbatch `index` at theta, for a v that is
            0 in tensors that it does not name.
        loss_moved: the loss of microbatch `index` at theta + v, in fp32, with the same convention.
        delta: the step, no tensor of zeros.
        random: signs v (Rademacher) of probe `index` for the tensors of delta, and v_t'(Hv)_t on
            microbatch `index`.
        microbatches: two or more.
        level: coverage of the intervals.

    Raises:
        UserError: a figure is not finite.

    Example: the loss 2 x^2 at x = 1 has g = H = 4; a step of 0.5 costs 2 + 0.5, the whole increase.
        >>> import torch
        >>> name = "model.layers.0.weight"
        >>> loss = lambda index, v: 2 * (1 + float(v[name] if v else 0)) ** 2
        >>> def along(index, v):
        ...     return Quadratic(2.0, 4 * v[name].item(), {name: 4 * v[name].item() ** 2})
        >>> random = lambda index: ({name: torch.ones(1)}, {name: 4.0})
        >>> figures = predict(along, loss, {name: torch.tensor([0.5])}, random, microbatches=2)
        >>> figures["whole"]["predicted"]["mean"], figures["whole"]["measured"]["mean"]
        (2.5, 2.5)
    """
    by_block: dict[str, Vector] = {}
    for name, tensor in delta.items():
        by_block.setdefault(block_of(name), {})[name] = tensor
    step = _Part("all blocks", delta)
    blocks = [_Part(block, moved) for block, moved in by_block.items()]

    losses = []
    for index in range(microbatches):
        probe, probed = random(index)
        # Over the signs, terms between two blocks have mean 0: one product serves every part.
        signed = evaluate(index, {name: probe[name] * moved for name, moved in delta.items()}).dots
        # By the function that measures after the step: rounding that they share is not an increase.
        losses.append(loss_moved(index, {}))
        for part in (step, *blocks):
            along = evaluate(index, part.moved)
            part.add(along, loss_moved(index, part.moved) - losses[-1], signed, probed)

    per_microbatch = {figure: step.values[figure] for figure in INCREASE}
    return {
        "microbatches": microbatches,
        "level": level,
        "loss": _mean(losses, level),
        "whole": step.summary(level) | {"per_microbatch": per_microbatch},
        "blocks": {part.label: part.summary(level) for part in blocks},
        "interaction": _interaction(step, blocks, level),
    }


def _interaction(step: _Part, blocks: list[_Part], level: float) -> dict[str, Any]:
    """Return the cost of the blocks together beyond the sum of their own."""
    beyond = {
        figure: [
            value - math.fsum(part.values[figure][index] for part in blocks)
            for index, value in enumerate(step.values[figure])
        ]
        for figure in ("second_order", "measured")
    }
    share = _ratio(beyond["second_order"], step.values["second_order"], level)
    return {figure: _mean(values, level) for figure, values in beyond.items()} | {"share": share}


def _mean(values: list[float], level: float) -> dict[str, Any]:
    return estimate_mean(values, level=level)._asdict()


def _ratio(above: list[float], below: list[float], level: float) -> dict[str, Any] | None:
    """Return the ratio r of two means over the same microbatches, None to 0.

    Its error is the delta method's: that of the mean of (above - r below) / mean(below).
    """
    scale = math.fsum(below) / len(below)
    if not scale:
        return None
    ratio = math.fsum(above) / len(above) / scale
    # Values whose mean is the ratio and whose spread is that of its error.
    pairs = zip(above, below, strict=True)
    return _mean([ratio + (a - ratio * b) / scale for a, b in pairs], level)
