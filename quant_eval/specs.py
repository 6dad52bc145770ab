"""A quantization setting is one frozen value with one name, such as gptq-b3-g128-actorder."""

import re
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from train.command import UserError, explain_validation
from train.frozen import Frozen

GRAMMAR = (
    "(rtn|gptq)-b<bits 2..8>-(g<group size>|perchannel)[-sym|-asym], for gptq then [-natural|-actorder]"
    "[-damp<fraction>], for example gptq-b3-g128 or gptq-b4-perchannel-asym-actorder-damp0.01"
)
SPEC_PATTERN = re.compile(
    r"(?P<method>rtn|gptq)-b(?P<bits>\d{1,2})-(?:g(?P<group>\d{1,6})|perchannel)(?:-(?P<symmetry>sym|asym))?"
    r"(?:-(?P<order>natural|actorder))?(?:-damp(?P<damping>\d(?:\.\d{1,6})?))?"
)
DEFAULT_DAMPING = 0.05


class QuantSpec(Frozen):
    """How the linear layers of the decoder blocks are rounded; embeddings, norms and lm_head are never touched.

    Scales are fp32 and the result is a dense, dequantized weight in the model's own dtype.
    """

    method: Literal["rtn", "gptq"]
    bits: int = Field(ge=2, le=8)
    group_size: int | None = Field(ge=2, description="input features that share a scale; None: a whole row does")
    symmetric: bool = Field(default=True, description="zero point fixed at 2^(bits - 1); otherwise fitted per group")
    order: Literal["natural", "actorder"] | None = Field(description="GPTQ's column order; None for rtn")
    damping: float | None = Field(ge=0, le=1, description="added to GPTQ's Hessian diagonal, x its mean; None for rtn")

    @model_validator(mode="after")
    def _options_fit_method(self) -> Self:
        is_gptq = self.method == "gptq"
        if (self.order is not None) != is_gptq or (self.damping is not None) != is_gptq:
            raise ValueError("column order and damping belong to gptq, and to gptq alone")
        return self

    @property
    def name(self) -> str:
        """The shortest name of this value: defaults are left out."""
        parts = [self.method, f"b{self.bits}", f"g{self.group_size}" if self.group_size else "perchannel"]
        if not self.symmetric:
            parts.append("asym")
        if self.order == "actorder":
            parts.append("actorder")
        if self.damping not in (None, DEFAULT_DAMPING):
            parts.append(f"damp{self.damping:.6f}".rstrip("0").rstrip("."))
        return "-".join(parts)


def parse_spec(text: str) -> QuantSpec:
    """The spec of a name; UserError with the grammar for anything that is not one.

    >>> parse_spec("gptq-b3-g32-sym-damp0.05").name
    'gptq-b3-g32'
    """
    match = SPEC_PATTERN.fullmatch(text)
    if match is None:
        raise UserError(f"unknown spec {text!r}; write {GRAMMAR}")
    is_gptq = match["method"] == "gptq"
    if not is_gptq and (match["order"] or match["damping"]):
        raise UserError(f"spec {text!r}: rounding to nearest has no column order and no damping; write {GRAMMAR}")
    values: dict[str, Any] = {
        "method": match["method"],
        "bits": int(match["bits"]),
        "group_size": int(match["group"]) if match["group"] else None,
        "symmetric": match["symmetry"] != "asym",
        "order": (match["order"] or "natural") if is_gptq else None,
        "damping": float(match["damping"] or DEFAULT_DAMPING) if is_gptq else None,
    }
    try:
        return QuantSpec(**values)
    except ValidationError as error:
        raise UserError(f"{explain_validation(f'spec {text!r}', error)}; write {GRAMMAR}") from None
