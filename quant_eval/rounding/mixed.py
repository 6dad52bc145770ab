"""Atom and QUIK: GPTQ with the loudest inputs last, in 8 bits or as they are.

Atom (Zhao et al. 2023, arXiv:2310.19102), QUIK (Ashkboos et al. 2023, arXiv:2310.09259). Both pick
the inputs of the largest H_ii: `order` puts them last. So the errors of the other inputs, the rest,
are pushed into weights that have finer grids, or none. `casts.mixed` casts inputs in the same way.

Shapes: O output features (rows), I input features, K of them kept, R the rest.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from base.ranks import Ranks
from base.rounding.gptq import BLOCK_COLUMNS, Preparation, gptq, gptq_with_errors
from base.rounding.grid import Rounded, check_scales
from base.rounding.order import num_kept
from quant_eval.specs import QuantSpec

ATOM_BITS = 8  # of the kept inputs and their weights

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
def round_mixed(weight_OI: Tensor, preparation: Preparation, spec: QuantSpec) -> Mixed:
    """Round all inputs but the kept ones by GPTQ, then move the kept ones to make good the errors.

    Atom then rounds the kept ones by GPTQ too, in 8 bits, on grids fitted to the weights as moved;
    QUIK leaves them. Groups, of either part, are formed along its inputs in natural order; without
    groups each part has one grid per row. (The authors of Atom round the kept ones to nearest, on
    one grid per row.) With no input kept it is GPTQ, with all it is GPTQ in 8 bits, or nothing.

    Rows do not interact: on a CPU every row comes out the same whichever are computed with it.

    Args:
        weight_OI: of linears that read one input, stacked.
        preparation: by `prepare` for this spec, whose order has the kept inputs last.
        spec: of method atom or quik.

    Raises:
        UserError: a weight is not finite.

    Example: 1.4 is rounded to 7 steps of 2.8 / 15; QUIK keeps 0.9 and adds its share of the error.
        >>> from base.rounding.gptq import prepare
        >>> from quant_eval.specs import parse_spec
        >>> spec = parse_spec("quik-b4-perchannel-keep0.5")
        >>> prepared = prepare(torch.tensor([[1.0, 0.5], [0.5, 4.0]]).double(), spec, "a weight")
        >>> dense_OI = round_mixed(torch.tensor([[1.4, 0.9]]), prepared, spec).dense()
        >>> [round(weight, 4) for weight in dense_OI[0].tolist()]
        [1.3067, 0.9113]
    """
    num_inputs = len(preparation.order_I)
    num_rest = num_inputs - num_kept(spec, num_inputs)
    first, last = slice(0, num_rest), slice(num_rest, num_inputs)
    rest_I, kept_I = preparation.order_I[first], preparation.order_I[last]
    rest: Part | None = None
    kept: Part | None = None

    kept_OK = weight_OI[:, kept_I].float()
    if num_rest:
        rest_OR, prepared = weight_OI[:, rest_I], _part(preparation, first)
        rest, errors_RO = gptq_with_errors(rest_OR, prepared, spec)
        kept_OK = _moved(kept_OK, preparation.factor_II[first, last], errors_RO)
    if len(kept_I) and spec.method == "atom":
        in_eight_bits = spec.model_copy(update={"bits": ATOM_BITS})
        kept = gptq(kept_OK, _part(preparation, last), in_eight_bits)
    elif len(kept_I):
        check_scales(kept_OK, weight_OI, spec)
        kept = kept_OK
    return Mixed(rest, kept, rest_I, kept_I)


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
