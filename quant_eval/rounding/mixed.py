"""Atom and QUIK: GPTQ with the loudest inputs last, in 8 bits or as they are.

Atom (Zhao et al. 2023, arXiv:2310.19102), QUIK (Ashkboos et al. 2023, arXiv:2310.09259). Both pick
the inputs of the largest H_ii: `kept_last` puts them last. So the errors of the other inputs, the
rest, are pushed into weights that have finer grids, or none. `casts.activations.MixedCast` casts
inputs in the same way.

Shapes: O output features (rows), I input features, K of them kept, R the rest.
"""

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch import Tensor

from base.ranks import Ranks
from quant_eval.group import Rounded
from quant_eval.quantizer import ColumnSpec
from quant_eval.rounding.gptq import BLOCK_COLUMNS, Preparation, gptq, gptq_with_errors
from quant_eval.rounding.grid import check_scales

Part = Rounded | Tensor  # a tensor: weights that are not rounded, fp32


@dataclass(frozen=True)
class Mixed:
    """A linear of two precisions.

    Attributes:
        rest: the rounded weights of the inputs `rest_I`; None if all are kept.
        kept: those of the inputs `kept_I`; None if none are.
        rest_I, kept_I: int64, rising; all input features together.
    """

    rest: Part | None
    kept: Part | None
    rest_I: Tensor
    kept_I: Tensor

    def dense(self) -> Tensor:
        """Return the weight, fp32 [O, I], in the order of the input features."""
        parts = [_dense(part) for part in (self.rest, self.kept) if part is not None]
        order_I = torch.cat([self.rest_I, self.kept_I])
        return torch.cat(parts, dim=1).index_select(1, order_I.argsort())

    def gathered(self, ranks: Ranks, rows: int) -> "Mixed":
        """Return all `rows`, from every rank's share of them.

        Every rank has to call it.
        """
        rest, kept = (_gathered(part, ranks, rows) for part in (self.rest, self.kept))
        return replace(self, rest=rest, kept=kept)


@torch.no_grad()
def round_mixed(
    weight_OI: Tensor,
    preparation: Preparation,
    spec: ColumnSpec,
    num_kept: int,
    kept_bits: int | None,
) -> Mixed:
    """Round all inputs but the kept ones by GPTQ, then move the kept ones to make good the errors.

    With `kept_bits` the kept ones are then rounded by GPTQ too, on grids fitted to the weights as
    moved. Groups, of either part, are formed along its inputs in natural order; without groups each
    part has one grid per row. (The authors of Atom round the kept ones to nearest, on one grid per
    row.) With no input kept it is GPTQ, with all it is GPTQ to `kept_bits`, or nothing.

    Rows do not interact: on a CPU every row comes out the same whichever are computed with it.

    Args:
        weight_OI: of linears that read one input, stacked.
        preparation: by `factored`, of an order that has the kept inputs last.
        spec: the grids of the inputs that are not kept; columns in natural order.
        num_kept: how many are.
        kept_bits: of the kept inputs' weights; None: they are not rounded.

    Raises:
        UserError: a weight is not finite.

    Example: 1.4 is rounded to 7 steps of 2.8 / 15; QUIK keeps 0.9 and adds its share of the error.
        >>> from quant_eval.rounding.gptq import prepare
        >>> spec = ColumnSpec(bits=4, group_size=None)
        >>> prepared = prepare(torch.tensor([[1.0, 0.5], [0.5, 4.0]]).double(), spec, "a weight")
        >>> dense_OI = round_mixed(torch.tensor([[1.4, 0.9]]), prepared, spec, 1, None).dense()
        >>> [round(weight, 4) for weight in dense_OI[0].tolist()]
        [1.3067, 0.9113]
    """
    num_inputs = len(preparation.order_I)
    num_rest = num_inputs - num_kept
    first, last = slice(0, num_rest), slice(num_rest, num_inputs)
    rest_I, kept_I = preparation.order_I[first], preparation.order_I[last]
    rest: Part | None = None
    kept: Part | None = None

    kept_OK = weight_OI[:, kept_I].float()
    if num_rest:
        # The upper rows of the factor: on the left they move the rest itself, on the right they
        # move the kept columns by its errors.
        rest_OR, prepared = weight_OI[:, rest_I], _part(preparation, first)
        rest, errors_RO = gptq_with_errors(rest_OR, prepared, spec)
        kept_OK = _moved(kept_OK, preparation.factor_II[first, last], errors_RO)
    if num_kept and kept_bits:
        # The trailing part of the factor compensates errors among the kept columns alone.
        in_more_bits = spec.model_copy(update={"bits": kept_bits})
        kept = gptq(kept_OK, _part(preparation, last), in_more_bits)
    elif num_kept:
        # No grid has met these weights, so NaN and infinity are looked for in the weights.
        check_scales(kept_OK, weight_OI, spec)
        kept = kept_OK
    return Mixed(rest, kept, rest_I, kept_I)


def num_kept(share: float, group_size: int | None, width: int) -> int:
    """Return how many of `width` inputs are kept: their share, rounded up to groups.

    Example:
        >>> num_kept(0.03, group_size=128, width=4096)
        128
    """
    size = group_size or 1
    exact = Fraction(str(share))  # the exact decimal: 0.07 of 100 inputs are 7
    return math.ceil(exact * width / size) * size


def kept_last(diagonal_I: Tensor, count: int) -> Tensor:
    """Return the features in natural order, but the `count` with the largest H_ii last."""
    is_kept_I = torch.zeros_like(diagonal_I, dtype=torch.bool)
    is_kept_I[diagonal_I.argsort(descending=True, stable=True)[:count]] = True
    # Stable, so that both parts stay in natural order.
    return is_kept_I.int().argsort(stable=True)


def _part(preparation: Preparation, positions: slice) -> Preparation:
    """Return the preparation of some positions of the order, in which they are natural."""
    features_I = preparation.order_I[positions]
    return Preparation(
        order_I=torch.arange(len(features_I), device=features_I.device),
        dead_I=preparation.dead_I[features_I],
        factor_II=preparation.factor_II[positions, positions],
    )


def _moved(kept_OK: Tensor, factor_RK: Tensor, errors_RO: Tensor) -> Tensor:
    """Return the kept weights, moved by the errors block by block as `gptq` moves columns."""
    num_outputs, num_kept = kept_OK.shape
    kept_KO = kept_OK.new_zeros(num_kept, errors_RO.shape[1])
    kept_KO[:, :num_outputs] = kept_OK.T
    for errors_CO, factor_CK in zip(
        errors_RO.split(BLOCK_COLUMNS), factor_RK.split(BLOCK_COLUMNS), strict=True
    ):
        kept_KO.addmm_(factor_CK.T, errors_CO, alpha=-1)
    return kept_KO[:, :num_outputs].T.contiguous()


def _dense(part: Part) -> Tensor:
    return part.dense() if isinstance(part, Rounded) else part


def _gathered(part: Part | None, ranks: Ranks, rows: int) -> Part | None:
    if isinstance(part, Tensor):
        return ranks.gather(part, rows)
    return part and part.gathered(ranks, rows)
