"""HQQ (Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models").

Shapes: O output features (rows), I input features, G groups of a row, K weights of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quant_eval.group import LinearGroup, Rounded, RoundedGroup
from quant_eval.quantizer import GridSpec, GroupSpec

if TYPE_CHECKING:
    from torch import Tensor

# The authors' settings of their solver.
NORM = 0.7  # p of sum |w - wq|^p
ITERATIONS = 20
FIRST_BETA, BETA_GROWTH = 10.0, 1.01
CHUNK_ROWS = 1024  # at a time


class HQQ(GroupSpec):
    """Integers whose zero points keep the weights' errors small in an l_p norm with p < 1.

    No checkpoint format holds its zero points, which lie between codes.
    """

    method = "hqq"
    title = "HQQ"
    source = (
        "Badri and Shaji 2023, mobiusml.github.io/hqq_blog: zero points by a half-quadratic solver"
        " (quant_eval/quantizers/hqq.py)"
    )
    is_calibrated = False

    def round(self, group: LinearGroup) -> RoundedGroup:
        """Round every group of weights by itself."""
        return RoundedGroup(group.by_rows(self._rounded).dense())

    def _rounded(self, weight_OI: Tensor) -> Rounded:
        import torch

        from quant_eval.rounding.grid import check_scales, fit_grid

        size = self.group_size or weight_OI.shape[1]
        weight_OGK = weight_OI.float().unflatten(1, (-1, size))
        spec = GridSpec(bits=self.bits, group_size=self.group_size, symmetric=False)
        grid = fit_grid(weight_OGK.permute(2, 0, 1), spec)
        check_scales(grid.scale, weight_OI, spec)

        # In chunks of rows, since a turn of the solver holds several tensors of their size.
        chunks = zip(
            weight_OGK.split(CHUNK_ROWS),
            grid.scale.split(CHUNK_ROWS),
            (-grid.lowest).split(CHUNK_ROWS),
            strict=True,
        )
        zeros, codes = zip(
            *(
                half_quadratic(chunk_OGK / scale_OG[..., None], zero_OG, 2**self.bits - 1)
                for chunk_OGK, scale_OG, zero_OG in chunks
            ),
            strict=True,
        )
        inputs_I = torch.arange(weight_OI.shape[1], dtype=torch.int32, device=weight_OI.device)
        codes_OI = torch.cat(codes).flatten(1).to(torch.uint8)
        return Rounded(codes_OI, grid.scale, torch.cat(zeros), inputs_I // size)


def half_quadratic(steps_OGK: Tensor, zero_OG: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return zero points that make sum |error|^p of each group small, and the codes, fp32.

    With weights u in steps of the scale, which stays, and codes q = round(u + z), clipped to
    0..most, the error is e = u - (q - z). Half-quadratic splitting takes a variable x for it and
    minimizes sum |x|^p + beta / 2 (x - e)^2 by turns: over x, by the generalized soft threshold,
    sign(e) max(|e| - |e|^(p - 1) / beta, 0), which leaves large errors, the outliers, to x; over z,
    by the mean of q - (u - x), the best zero point for what x leaves. Beta grows at every turn.

    Of each group the best zero point of all turns is returned, the first included, so that no
    group is worse than on the grid that is given. The authors stop all groups together when their
    mean error grows; and their errors are in the unit of the weights, on which beta then depends.

    Args:
        steps_OGK: fp32, the weights over the scales of their groups.
        zero_OG: fp32, where to begin.
        most: the largest code.
    """
    import torch

    best_OG, least_OG = zero_OG, torch.full_like(zero_OG, torch.inf, dtype=torch.float64)
    for turn in range(ITERATIONS + 1):
        codes_OGK = (steps_OGK + zero_OG[..., None]).round_().clamp_(0, most)
        error_OGK = steps_OGK - (codes_OGK - zero_OG[..., None])
        size_OGK = error_OGK.abs()
        # Judged before the zero point moves: the codes are those of this one.
        objective_OG = size_OGK.pow(NORM).sum(-1, dtype=torch.float64)
        best_OG = torch.where(objective_OG < least_OG, zero_OG, best_OG)
        least_OG = torch.minimum(objective_OG, least_OG)

        beta = FIRST_BETA * BETA_GROWTH**turn
        # an error of 0 has a threshold of infinity, and stays 0
        outlier_OGK = error_OGK.sign() * (size_OGK - size_OGK.pow(NORM - 1) / beta).clamp(min=0)
        target_OGK = codes_OGK - (steps_OGK - outlier_OGK)
        zero_OG = target_OGK.mean(-1, dtype=torch.float64).float()
    return best_OG, (steps_OGK + best_OG[..., None]).round_().clamp_(0, most)
