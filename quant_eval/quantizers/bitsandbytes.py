"""LLM.int8() and NF4 by bitsandbytes; `rounding.bitsandbytes` calls it."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from base.errors import UserError
from quant_eval.grammar import number
from quant_eval.group import LinearGroup, RoundedGroup
from quant_eval.quantizer import GroupSpec, QuantSpec

NF4_GROUP_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # of bitsandbytes


class Int8(QuantSpec):
    """Integers of 8 bits, activations too but for those above a threshold."""

    method = "int8"
    title = "LLM.int8()"
    source = (
        "Dettmers et al. 2022, arXiv:2208.07339, by bitsandbytes 0.50; activations are quantized"
        " too"
    )
    library = "bitsandbytes"
    widths = (8,)
    is_calibrated = False
    casts_inputs = True

    threshold: Annotated[float, number("t", "threshold {:g}")] = Field(
        ge=0, description="activations above it stay in 16 bits; 0: none do"
    )

    def round(self, group: LinearGroup) -> RoundedGroup:
        """Round the weights of modules that compute in place of the linears."""
        import torch

        from quant_eval.rounding.bitsandbytes import dense_weight, int8_linear

        modules = [
            int8_linear(name, linear, self.threshold) for name, linear in group.linears.items()
        ]
        dense_OI = torch.cat([dense_weight(module) for module in modules])
        return RoundedGroup(dense_OI, modules=modules)


class NF4(GroupSpec):
    """The 16 quantiles of a normal distribution, times max|w| of a group."""

    method = "nf4"
    title = "NF4"
    source = (
        "Dettmers et al. 2023, arXiv:2305.14314, by bitsandbytes 0.50, without double quantization"
    )
    library = "bitsandbytes"
    widths = (4,)
    is_calibrated = False

    @model_validator(mode="after")
    def _has_groups(self) -> Self:
        if self.group_size is None:
            raise ValueError("nf4 needs a group size")
        return self

    def check_sizes(self, name: str, shape: tuple[int, int]) -> None:
        """Raise UserError for groups that bitsandbytes does not take, or that do not divide."""
        if self.group_size not in NF4_GROUP_SIZES:
            sizes = ", ".join(map(str, NF4_GROUP_SIZES))
            raise UserError(f"nf4 does not take groups of {self.group_size}; choose one of {sizes}")
        super().check_sizes(name, shape)

    def round(self, group: LinearGroup) -> RoundedGroup:
        """Round every weight by itself."""
        from quant_eval.rounding.bitsandbytes import nf4_dense

        assert self.group_size is not None
        return RoundedGroup(nf4_dense(group.weight_OI, self.group_size))
