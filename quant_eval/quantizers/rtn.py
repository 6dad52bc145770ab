"""RTN: rounding to the nearest point of a grid."""

from typing import Any

from quant_eval.formats import FORMATS
from quant_eval.group import LinearGroup, RoundedGroup
from quant_eval.quantizer import GridSpec


class RTN(GridSpec):
    """Rounding to nearest; names begin with a format, or with w<bits>a<bits>, where they can."""

    method = "rtn"
    title = "RTN"
    source = "rounding to nearest on min-max grids (quant_eval/rounding/grid.py)"
    is_calibrated = False

    def round(self, group: LinearGroup) -> RoundedGroup:
        """Round every weight by itself."""
        from quant_eval.rounding.grid import largest_of, round_to_nearest

        largest = largest_of(group.weight_OI)
        rounded = group.by_rows(lambda rows_OI: round_to_nearest(rows_OI, self, largest))
        return RoundedGroup(rounded.dense(), rounded)

    def _head(self) -> tuple[str, dict[str, Any]]:
        if self.format != "int":
            return self.format, {}
        if self.activations and self.activations.startswith("int"):
            # Names such as w4a4 state bits and activations, and one scale per channel is their
            # default.
            stated = {"bits": self.bits, "activations": self.activations, "group_size": None}
            return f"w{self.bits}a{self.activations.removeprefix('int')}", stated
        return self.method, {}

    def _title(self) -> str:
        row = FORMATS.get(self.format)
        return row.title if row else self.title
