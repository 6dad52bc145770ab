"""SAM sharpness: how much the loss rises on the way uphill to a given distance (Foret et al. 2021, arXiv:2010.01412).

Shapes: B sequences, R radii, K ascent steps.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ckpt_tools.ranks import Ranks
from curvature.slices.losses import SequenceLosses, mean_and_error
from curvature.slices.plane import dot, gathered
from train.command import Progress, UserError


class Ascent:
    """Ascent from a model's weights, which it overwrites and puts back.

    Args:
        losses: the model, at the base, and the text.

    Raises:
        UserError: the gradient at the base is zero or not finite.
    """

    def __init__(self, losses: SequenceLosses) -> None:
        self._losses = losses
        self._base = {name: weight.detach().clone() for name, weight in losses.weights.items()}
        self._gradient = losses.gradient()
        self.gradient_norm = math.sqrt(dot(self._gradient, self._gradient))
        if not 0 < self.gradient_norm < math.inf:
            raise UserError(f"the gradient's norm is {self.gradient_norm}, no way uphill; give a finite checkpoint")

    def losses_on_the_way(self, radius: float, steps: int) -> Tensor:
        """Losses after each of K steps of projected gradient ascent in the ball of that radius, float64 [K, B].

        e <- projection of e + radius g / |g| onto the ball, g the gradient of the mean loss at theta + e. The first
        step is SAM's (equation 2 with p = 2): e = radius g / |g|.
        """
        found, gradient, norm = [], self._gradient, self.gradient_norm
        offset = {name: torch.zeros_like(weight) for name, weight in self._base.items()}
        for step in range(steps):
            if step:
                gradient = self._losses.gradient()
                norm = math.sqrt(dot(gradient, gradient))
            for name, moved in offset.items():
                moved.add_(gradient[name], alpha=radius / norm)
            length = math.sqrt(dot(offset, offset))
            if length > radius:
                for moved in offset.values():
                    moved.mul_(radius / length)
            self._move(offset)
            found.append(self._losses())
        self._move({})
        return torch.stack(found)

    @torch.no_grad()
    def _move(self, offset: dict[str, Tensor]) -> None:
        for name, weight in self._losses.weights.items():
            weight.copy_(self._base[name])
            if name in offset:
                weight.add_(offset[name])


def sam_sharpness(
    losses: SequenceLosses, base_B: Tensor, theta_norm: float, radii: Sequence[float], steps: int, ranks: Ranks
) -> dict[str, object]:
    """Largest L(theta + e) - L(theta) over |e| <= radius, nats per token, to first order and as the ascent finds it.

    Radii are shared out over ranks. Gradient and losses are of the same sequences; the standard errors are over the
    sequences' differences for the direction that was found, not over other directions that other text would give.

    Raises:
        UserError: the gradient is zero, or a loss is not finite.
    """
    ascent = Ascent(losses)
    share = ranks.share(len(radii))
    with Progress("SAM", total=len(share)) as progress:
        found: dict[int, Tensor] = {}
        for index in share:
            found |= {
                index * steps + step: row for step, row in enumerate(ascent.losses_on_the_way(radii[index], steps))
            }
            progress.advance()
    places = [f"radius {radius:g} after {step + 1} ascent steps" for radius in radii for step in range(steps)]
    increases_RKB = gathered(found, places, len(base_B), ranks).view(len(radii), steps, -1) - base_B
    rows = []
    for radius, increases_KB in zip(radii, increases_RKB, strict=True):
        sharpness, error = mean_and_error(increases_KB[0])
        worst = int(increases_KB.mean(dim=1).argmax())
        worst_sharpness, worst_error = mean_and_error(increases_KB[worst])
        rows.append(
            {
                "radius": radius,
                "relative_radius": radius / theta_norm,
                "first_order": radius * ascent.gradient_norm,
                "sharpness": sharpness,
                "standard_error": error,
                "worst": {"step": worst + 1, "sharpness": worst_sharpness, "standard_error": worst_error},
            }
        )
    return {"gradient_norm": ascent.gradient_norm, "radii": rows}
