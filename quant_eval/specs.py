"""A quantization setting is one frozen value with one name, such as gptq-b3-g128-actorder."""

import re
from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from base.errors import UserError
from base.frozen import Frozen
from quant_eval.methods import METHODS, Method, MethodName

Order = Literal["natural", "actorder", "groupaware"]

EXAMPLES = (
    "gptq-b3-g128, gptq-b4-perchannel-asym-actorder-damp0.01, gptqmodel-b4-g128-paper,"
    " gptaq-b3-g128, awq-b4-g128, rtn-b3-g32, int8-t6, nf4-g64"
)
GRAMMAR = (
    f"({'|'.join(METHODS)})[-b<bits>][-g<group"
    " size>|-perchannel][-sym|-asym][-natural|-actorder|-groupaware][-static]"
    "[-damp<fraction>][-alpha<fraction>][-t<threshold>][-s16];"
    f" for example {EXAMPLES}; 'python -m quant_eval methods' lists what each takes"
)
_NUMBER = r"\d{1,3}(?:\.\d{1,6})?"
SPEC_PATTERN = re.compile(
    rf"(?P<method>{'|'.join(METHODS)})(?:-b(?P<bits>\d{{1,2}}))?"
    r"(?:-(?:g(?P<group_size>\d{1,6})|(?P<row>perchannel)))?"
    r"(?:-(?P<symmetric>sym|asym))?"
    r"(?:-(?:(?P<order>natural|actorder|groupaware)|(?P<paper>paper)))?(?P<static_groups>-static)?"
    rf"(?:-damp(?P<damping>{_NUMBER}))?(?:-alpha(?P<alpha>{_NUMBER}))?"
    rf"(?:-t(?P<threshold>{_NUMBER}))?(?P<scales>-s16)?",
    re.ASCII,
)
# The value of a setting, from what its part of a name holds.
VALUES: dict[str, Callable[[str], Any]] = {
    "bits": int,
    "group_size": int,
    "symmetric": lambda text: text == "sym",
    "order": str,
    "static_groups": bool,
    "damping": float,
    "alpha": float,
    "threshold": float,
    "scales": lambda _: "fp16",
}
# GPTQ as arXiv:2510.06213 ran it: the defaults of gptqmodel before version 5.
PAPER: dict[str, Any] = {
    "group_size": 128,
    "symmetric": True,
    "order": "actorder",
    "static_groups": False,
    "damping": 0.05,
}


class QuantSpec(Frozen):
    """The settings of a quantization of the decoder blocks' linears, and of nothing else.

    A setting is None where the method's row in `METHODS` does not name it.
    """

    method: MethodName
    bits: int = Field(ge=2, le=8)
    group_size: int | None = Field(
        default=None, ge=2, description="inputs that share a scale; None: a whole row does"
    )
    symmetric: bool | None = Field(
        default=None, description="zero point fixed at 2^(bits - 1), or fitted per group"
    )
    order: Order | None = Field(default=None, description="in which columns are rounded")
    static_groups: bool | None = Field(
        default=None, description="grids fitted before any column is rounded"
    )
    damping: float | None = Field(
        default=None, ge=0, le=1, description="added to the Hessian's diagonal, x its mean"
    )
    alpha: float | None = Field(
        default=None, ge=0, le=1, description="weight of GPTAQ's asymmetric term"
    )
    threshold: float | None = Field(
        default=None, ge=0, description="activations above it stay in 16 bits; 0: none do"
    )
    scales: Literal["fp32", "fp16"] | None = Field(
        default=None, description="fp16: as a saved checkpoint holds them"
    )

    @property
    def row(self) -> Method:
        """The method's row of the table."""
        return METHODS[self.method]

    @model_validator(mode="after")
    def _options_fit_method(self) -> Self:
        if self.bits not in self.row.bits:
            raise ValueError(
                f"{self.method} takes {', '.join(map(str, self.row.bits))} bits, not {self.bits}"
            )
        for option, given in self:
            if option in ("method", "bits", "group_size"):
                continue
            if (given is not None) != (option in self.row.defaults):
                what = "needs" if given is None else "does not take"
                raise ValueError(f"{self.method} {what} {option}")
        if self.group_size is None and self.method == "nf4":
            raise ValueError("nf4 needs a group size")
        if self.group_size is not None and "group_size" not in self.row.defaults:
            raise ValueError(f"{self.method} does not take a group size")
        if self.order == "groupaware" and self.group_size is None:
            raise ValueError("groupaware orders groups: give a group size, or use actorder")
        if self.static_groups and self.order == "groupaware":
            raise ValueError(
                "static groups are for natural order and actorder; groupaware keeps groups whole"
                " anyway"
            )
        return self

    @property
    def name(self) -> str:
        """The shortest name of this value: defaults are left out."""
        defaults = self.row.defaults
        parts: list[str] = [self.method]
        if len(self.row.bits) > 1:
            parts.append(f"b{self.bits}")
        if "group_size" in defaults:
            parts.append(f"g{self.group_size}" if self.group_size else "perchannel")
        if self.method == "gptqmodel" and PAPER.items() <= self.model_dump().items():
            return "-".join([*parts, "paper"])
        if self.symmetric != defaults.get("symmetric"):
            parts.append("sym" if self.symmetric else "asym")
        if self.order not in (None, "natural"):
            parts.append(str(self.order))
        if self.static_groups:
            parts.append("static")
        for label, option in (("damp", "damping"), ("alpha", "alpha"), ("t", "threshold")):
            value = getattr(self, option)
            if value != defaults.get(option):
                parts.append(label + f"{value:.6f}".rstrip("0").rstrip("."))
        if self.scales == "fp16":
            parts.append("s16")
        return "-".join(parts)


def parse_spec(text: str) -> QuantSpec:
    """The spec of a name; UserError with the grammar for anything that is not one.

    >>> parse_spec("gptq-b3-g32-sym-damp0.05").name
    'gptq-b3-g32'
    """
    match = SPEC_PATTERN.fullmatch(text)
    if match is None:
        raise UserError(f"unknown spec {text!r}; write {GRAMMAR}")
    row = METHODS[match["method"]]  # type: ignore[index]
    given = {key: value(match[key]) for key, value in VALUES.items() if match[key]}
    problem = None
    if len(row.bits) > 1 and "bits" not in given:
        problem = f"{match['method']} needs its bits"
    elif "group_size" in row.defaults and not (match["group_size"] or match["row"]):
        problem = f"{match['method']} needs a group size or perchannel"
    elif match["paper"] and (
        match["method"] != "gptqmodel" or given != {"bits": given["bits"], "group_size": 128}
    ):
        problem = "paper stands for all settings of gptqmodel but bits, in groups of 128"
    if problem:
        raise UserError(f"spec {text!r}: {problem}; write {GRAMMAR}")
    values = {"method": match["method"], "bits": row.bits[0]} | row.defaults | given
    if match["paper"]:
        values |= PAPER
    try:
        return QuantSpec.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        reason = where + first["msg"].removeprefix("Value error, ")
        raise UserError(f"spec {text!r}: {reason}; write {GRAMMAR}") from None
