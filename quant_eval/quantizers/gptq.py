"""GPTQ (Frantar et al. 2022, arXiv:2210.17323); `rounding.gptq` rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quant_eval.group import LinearGroup, RoundedGroup
from quant_eval.quantizer import ColumnSpec

if TYPE_CHECKING:
    from quant_eval.rounding.gptq import Preparation


class GPTQ(ColumnSpec):
    """Column after column, each making good the errors of those before it."""

    method = "gptq"
    title = "GPTQ"
    source = "Frantar et al. 2022, arXiv:2210.17323, algorithm 1 (quant_eval/rounding/gptq.py)"

    def round(self, group: LinearGroup) -> RoundedGroup:
        """Round the columns of every rank's rows."""
        from quant_eval.rounding.gptq import gptq
        from quant_eval.rounding.grid import largest_of

        prepared, largest = self._prepared(group), largest_of(group.weight_OI)
        rounded = group.by_rows(lambda rows_OI: gptq(rows_OI, prepared, self, largest))
        return RoundedGroup(rounded.dense(), rounded)

    def _prepared(self, group: LinearGroup) -> Preparation:
        """Return the factor of the group's Hessian, in which bits have no part."""
        from quant_eval.rounding.gptq import prepare

        assert group.hessian_II is not None
        # All of the spec that `prepare` reads: one order alone is of groups.
        ordered_groups = self.group_size if self.order == "groupaware" else None
        key = (self.order, ordered_groups, self.damping)
        if key not in group.shared:
            group.shared[key] = prepare(
                group.hessian_II, self, group.name, group.products, group.ranks
            )
        preparation: Preparation = group.shared[key]
        return preparation
