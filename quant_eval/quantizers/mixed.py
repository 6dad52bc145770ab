"""Atom and QUIK: GPTQ with the loudest inputs last, in 8 bits or as they are.

`rounding.mixed` rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from quant_eval.grammar import number
from quant_eval.group import LinearGroup, RoundedGroup
from quant_eval.quantizer import (
    CASTS,
    ColumnSpec,
    Damping,
    GroupSpec,
    Symmetric,
)

if TYPE_CHECKING:
    from torch import Tensor

    from quant_eval.casts.activations import MixedCast

KEPT_BITS = 8  # of the inputs that Atom keeps, and of their weights


class MixedSpec(GroupSpec):
    """GPTQ with the inputs of the largest H_ii last and in more bits.

    Class attributes:
        kept_bits: of the weights of those inputs; None: they are not rounded.
    """

    extras = CASTS
    kept_bits: ClassVar[int | None] = None

    symmetric: Symmetric = True
    damping: Damping = 0.05
    kept: Annotated[float, number("keep", "kept {:g}")] = Field(
        ge=0, le=1, description="share of inputs in 8 bits (Atom) or 16 (QUIK)"
    )

    @property
    def columns(self) -> ColumnSpec:
        """The grids of the inputs that are not kept."""
        return ColumnSpec(
            bits=self.bits,
            group_size=self.group_size,
            symmetric=self.symmetric,
            damping=self.damping,
        )

    def round(self, group: LinearGroup) -> RoundedGroup:
        """Round the inputs that are not kept, then move those that are."""
        from quant_eval.rounding.gptq import factored
        from quant_eval.rounding.mixed import Mixed, kept_last, num_kept, round_mixed

        assert group.hessian_II is not None
        count = num_kept(self.kept, self.group_size, len(group.hessian_II))
        order_I = kept_last(group.hessian_II.diagonal(), count)
        prepared = factored(
            group.hessian_II, order_I, self.damping, group.name, group.products, group.ranks
        )
        rounded: Mixed = group.by_rows(
            lambda rows_OI: round_mixed(rows_OI, prepared, self.columns, count, self.kept_bits)
        )
        cast = self.input_cast(rounded.kept_I, len(order_I)) if self.activations else None
        return RoundedGroup(rounded.dense(), cast=cast)

    def input_cast(self, kept_I: Tensor, width: int) -> MixedCast:
        """Return a new cast of inputs of `width` features, some of which are kept.

        UserError if the format's groups do not divide the inputs that are not kept.
        """
        raise NotImplementedError


class Atom(MixedSpec):
    """The kept inputs and their weights have 8 bits."""

    method = "atom"
    title = "Atom"
    source = (
        "Zhao et al. 2023, arXiv:2310.19102: GPTQ with the inputs of the largest H_ii last and in 8"
        " bits (quant_eval/rounding/mixed.py)"
    )
    kept_bits = KEPT_BITS

    def input_cast(self, kept_I: Tensor, width: int) -> MixedCast:
        """Return a cast of the kept inputs to int8, and of the rest as the spec says.

        Integers have a scale per token and group, as the weights do (arXiv:2310.19102, section
        4.2). A static cast has one scale for the rest and one for what is kept.
        """
        from quant_eval.casts.activations import ActivationCast, MixedCast

        assert self.activations is not None
        has_groups = self.activations.startswith(("int", "fp8"))
        size, static = self.group_size, self.static_activations
        num_kept, rest, kept = len(kept_I), None, None
        if num_kept < width:
            rest_size = (size if has_groups else None) or width - num_kept
            rest = ActivationCast(self.activations, rest_size, static)
        if num_kept:
            kept = ActivationCast(f"int{KEPT_BITS}", size or num_kept, static)
        return MixedCast(kept_I, width, rest, kept)


class QUIK(MixedSpec):
    """The kept inputs and their weights are not rounded."""

    method = "quik"
    title = "QUIK"
    source = (
        "Ashkboos et al. 2023, arXiv:2310.09259: GPTQ with the inputs of the largest H_ii last and"
        " not rounded (quant_eval/rounding/mixed.py)"
    )

    def input_cast(self, kept_I: Tensor, width: int) -> MixedCast:
        """Return a cast of the inputs that are not kept, with one scale per token."""
        from quant_eval.casts.activations import ActivationCast, MixedCast

        assert self.activations is not None
        num_rest, rest = width - len(kept_I), None
        if num_rest:
            rest = ActivationCast(self.activations, num_rest, self.static_activations)
        return MixedCast(kept_I, width, rest, None)
