"""Linears that read one input, as a quantizer is handed them, and their weights after rounding.

Imports no torch, which takes seconds.

Shapes: O output features (rows), I input features, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from base.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from base.ranks import Ranks
    from quant_eval.numbers import Numbers


@dataclass(frozen=True)
class LinearGroup:
    """Linears that read one input, as a quantizer is handed them; rows do not interact.

    Attributes:
        name: of the first linear, for messages.
        sizes: output features of each.
        weight_OI: stacked along O, in the basis of the transform.
        hessian_II: float64, the mean of x x^T of the inputs in that basis; None if unknown.
        products: dtype that the Hessian's products were summed in.
        ranks: that share the rows; every rank has to round the group.
        seed: of random signs.
        linears: the modules themselves, by name.
        library_OI: the weights as another project's library rounded them.
        shared: what quantizers of one group need alike, such as a factor of the Hessian.
    """

    name: str
    sizes: Sequence[int]
    weight_OI: Tensor
    hessian_II: Tensor | None
    products: torch.dtype
    ranks: Ranks
    seed: tuple[int, ...] = ()
    linears: Mapping[str, nn.Linear] = field(default_factory=dict)
    library_OI: Tensor | None = None
    shared: dict[Any, Any] = field(default_factory=dict)

    def by_rows(self, rounding: Callable[[Tensor], Any]) -> Any:
        """Return all rows rounded: each rank rounds its share.

        `rounding` returns what has `gathered`. UserError with the name of the linear.
        """
        count = len(self.weight_OI)
        share = self.ranks.share(count)
        try:
            rounded = rounding(self.weight_OI[share.start : share.stop])
        # Rounding knows rows and no names.
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None
        return rounded.gathered(self.ranks, count)


@dataclass(frozen=True)
class Rounded:
    """A quantized linear: codes and their grids.

    Attributes:
        codes_OI: uint8, in the order of the input features.
        scales_OG: fp32 (values of fp16 where the spec says so).
        zeros_OG: the code of 0, uint8; fp32 where it may lie between codes.
        groups_I: int32, the group of each input feature.
        numbers: names the number of each code where codes are not integers.
        global_scale: fp32 [1], of NVFP4; `scales_OG` contain it (`rounding.grid.local_scales`).
    """

    codes_OI: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor
    groups_I: Tensor
    numbers: Numbers | None = None
    global_scale: Tensor | None = None

    def dense(self) -> Tensor:
        """Return the weight, scale x (code - zero) or x number, fp32 [O, I]; rounded once."""
        groups_I = self.groups_I.long()
        if self.numbers is not None:
            table_P = self.numbers.table().to(self.codes_OI.device)
            # torch takes uint8 indices for a mask.
            return table_P[self.codes_OI.int()] * self.scales_OG[:, groups_I]
        return (self.codes_OI.float() - self.zeros_OG.float()[:, groups_I]) * self.scales_OG[
            :, groups_I
        ]

    def gathered(self, ranks: Ranks, rows: int) -> Rounded:
        """Return all `rows`, from every rank's share of them; every rank has to call it."""
        return replace(
            self,
            codes_OI=ranks.gather(self.codes_OI, rows),
            scales_OG=ranks.gather(self.scales_OG, rows),
            zeros_OG=ranks.gather(self.zeros_OG, rows),
        )


@dataclass(frozen=True)
class RoundedGroup:
    """The weights of a group after rounding.

    Attributes:
        dense_OI: in the basis of the transform.
        codes: of all rows, for a checkpoint; None where none are kept.
        cast: of the inputs, where it is not the spec's plain one: a `casts.activations.MixedCast`.
        modules: what computes in place of each linear, where a library's own modules do.
    """

    dense_OI: Tensor
    codes: Rounded | None = None
    cast: Any = None
    modules: Sequence[nn.Module] | None = None
