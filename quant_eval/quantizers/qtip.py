"""QTIP (Tseng et al. 2024, arXiv:2406.11235); `rounding.trellis` rounds."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from quant_eval.grammar import number
from quant_eval.group import LinearGroup, RoundedGroup
from quant_eval.quantizer import CACHE, Damping, QuantSpec
from quant_eval.sizes import check_tiles


class QTIP(QuantSpec):
    """Trellis codes after random Hadamard transforms of inputs and outputs."""

    method = "qtip"
    title = "QTIP"
    source = (
        "Tseng et al. 2024, arXiv:2406.11235: trellis codes of 2^states states after random"
        " Hadamard transforms (quant_eval/rounding/trellis.py)"
    )
    widths = (2, 3, 4)
    extras = CACHE

    damping: Damping = 0.05
    states: Annotated[int, number("l", "states {:g}", int)] = Field(
        default=12, ge=4, le=16, description="log2 of the states of QTIP's trellis"
    )

    @model_validator(mode="after")
    def _states_hold_the_bits(self) -> Self:
        if self.states < 2 * self.bits:
            raise ValueError(f"{self.bits} bits need -l{2 * self.bits} or more")
        return self

    def check_sizes(self, name: str, shape: tuple[int, int]) -> None:
        """Raise UserError for a linear without tiles or Hadamard matrices."""
        outputs, inputs = shape
        check_tiles(inputs, f"inputs of {name}", self.bits)
        check_tiles(outputs, f"outputs of {name}", self.bits)

    def round(self, group: LinearGroup) -> RoundedGroup:
        """Round the tiles of every rank's rows."""
        from quant_eval.rounding.trellis import qtip

        return RoundedGroup(qtip(group, self.bits, self.states, self.damping))
