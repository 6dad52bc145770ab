"""A quantization setting is one frozen value with one name, such as gptq-b3-g128-actorder."""

from functools import cache
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from base.errors import UserError
from base.frozen import Frozen
from quant_eval.casts.formats import FORMATS, Format
from quant_eval.grammar import HINT, defaults_of, read_name, write_name
from quant_eval.methods import CASTS, METHODS, TRANSFORMS, Method, MethodName
from quant_eval.transforms.rotations import ROTATIONS, RotationName

Order = Literal["natural", "actorder", "groupaware"]
Integers = Literal["int2", "int3", "int4", "int5", "int6", "int7", "int8"]


class QuantSpec(Frozen):
    """The settings of a quantization of the decoder blocks' linears and their KV cache.

    A setting is None, or False, where the method's row in `METHODS` does not name it.
    """

    method: MethodName
    bits: int = Field(ge=1, le=16)
    format: Format = Field(default="int", description="numbers that weights are rounded to")
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
    kept: float | None = Field(
        default=None, ge=0, le=1, description="share of inputs in 8 bits (Atom) or 16 (QUIK)"
    )
    states: int | None = Field(
        default=None, ge=4, le=16, description="log2 of the states of QTIP's trellis"
    )
    iterations: int | None = Field(default=None, ge=1, description="steps of what is learned")
    scales: Literal["fp32", "fp16"] | None = Field(
        default=None, description="fp16: as a checkpoint in GPTQ's format holds them"
    )
    activations: Integers | Format | None = Field(
        default=None, description="numbers that the inputs of linears are cast to, token by token"
    )
    static_activations: bool = Field(
        default=False, description="one scale per tensor, from the calibration text"
    )
    kv: Integers | Literal["fp8"] | None = Field(
        default=None, description="numbers that keys and values are cast to"
    )
    shift: bool = Field(default=False, description="the inputs' means are taken off before a cast")
    smooth: float | None = Field(
        default=None, ge=0, le=1, description="SmoothQuant's alpha: the inputs' share of the scales"
    )
    rotation: RotationName | None = Field(default=None, description="of the inputs of linears")
    rotation_block: int | None = Field(
        default=None, ge=2, description="inputs that are rotated together; None: the whole width"
    )

    @property
    def row(self) -> Method:
        """The method's row of the table."""
        return METHODS[self.method]

    @property
    def name(self) -> str:
        """The shortest name of this value: defaults are left out."""
        return write_name(self.model_dump())

    @property
    def casts(self) -> bool:
        """True if more than weights is rounded, so that no weights alone reproduce it."""
        return self.method == "int8" or bool(self.activations or self.kv)

    @property
    def is_transformed(self) -> bool:
        """True if linears read other inputs than the model's."""
        return bool(self.shift or self.smooth is not None or self.rotation)

    @property
    def needs_calibration(self) -> bool:
        """True if the result depends on the calibration text."""
        is_fitted = bool(self.rotation and ROTATIONS[self.rotation].needs_calibration)
        has_fixed_scales = self.activations == "nvfp4" or self.static_activations
        has_fixed_scales |= self.kv == "fp8"
        is_fitted |= self.shift or self.smooth is not None or has_fixed_scales
        return self.row.needs_calibration or is_fitted

    @model_validator(mode="after")
    def _options_fit_method(self) -> Self:
        row = FORMATS.get(self.format)
        if row and self.method not in ("rtn", "gptq"):
            raise ValueError(f"{self.method} does not round to {self.format}; give rtn or gptq")
        if not row and self.bits not in self.row.bits:
            raise ValueError(
                f"{self.method} takes {', '.join(map(str, self.row.bits))} bits, not {self.bits}"
            )
        defaults = defaults_of(self.model_dump())
        for option, value in self:
            if option in ("method", "bits", "format", "group_size"):
                continue
            if option in CASTS + TRANSFORMS:
                if value not in (None, False) and option not in self.row.extras:
                    raise ValueError(f"{self.method} does not take {option}")
            elif (value is not None) != (option in defaults):
                what = "needs" if value is None else "does not take"
                raise ValueError(f"{self.method} {what} {option}")
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        row = FORMATS.get(self.format)
        if self.states is not None and self.states < 2 * self.bits:
            raise ValueError(f"{self.bits} bits need -l{2 * self.bits} or more")
        if self.group_size is None and self.method == "nf4":
            raise ValueError("nf4 needs a group size")
        if self.group_size is not None and "group_size" not in self.row.defaults:
            raise ValueError(f"{self.method} does not take a group size")
        if row and row.grouping is not None and self.group_size != (row.grouping or None):
            raise ValueError(f"{self.format} has its own groups")
        if row and (not self.symmetric or self.scales == "fp16"):
            raise ValueError(f"{self.format} has its own scales; leave -asym and -s16 out")
        if self.order == "groupaware" and self.group_size is None:
            raise ValueError("groupaware orders groups: give a group size, or use actorder")
        if self.static_groups and self.order == "groupaware":
            raise ValueError(
                "static groups are for natural order and actorder; groupaware keeps groups whole"
                " anyway"
            )
        return self

    @model_validator(mode="after")
    def _casts_and_transforms_fit(self) -> Self:
        rounds = self.method != "none" or self.activations
        if not rounds and not self.kv:
            raise ValueError("nothing is rounded; give a method, -a or -kv")
        if self.scales == "fp16" and (self.casts or self.is_transformed):
            raise ValueError("-s16 is for weights alone, as GPTQ's format holds them; leave it out")
        if self.static_activations and not self.activations:
            raise ValueError("astatic is for activations; give -a as well")
        if self.static_activations and self.activations not in ("int8", "fp8", "fp8e5m2"):
            raise ValueError("one scale per tensor is for 8 bits: give -a8 or -afp8")
        if self.shift and not self.activations:
            raise ValueError("baseq shifts what is cast; give -a, such as -a4")
        if self.is_transformed and not rounds and self.rotation not in ("quarot", "quarot-fused"):
            raise ValueError("the KV cache alone is rotated by quarot; give that, or a method")
        return self

    @model_validator(mode="after")
    def _transforms_compose(self) -> Self:
        if self.rotation is None:
            return self
        rotation = ROTATIONS[self.rotation]
        if self.rotation_block and not rotation.takes_block:
            raise ValueError(f"{self.rotation} has no blocks to choose")
        if rotation.is_learned and (self.smooth is not None or self.shift):
            raise ValueError(f"{self.rotation} learns all of its transform; leave the others out")
        if self.rotation == "quarot-fused" and (self.smooth is not None or self.shift):
            raise ValueError(
                "quarot-fused rotates the residual stream, which nothing else can scale; give"
                " quarot"
            )
        return self


@cache
def parse_spec(text: str) -> QuantSpec:
    """Return the spec of a name.

    UserError with the grammar for a text that is not a name.

    >>> parse_spec("gptq-b3-g32-sym-damp0.05").name
    'gptq-b3-g32'
    >>> parse_spec("rtn-b4-g128-a4-quarot").name
    'w4a4-g128-quarot'
    """
    values = read_name(text)
    try:
        return QuantSpec.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{part}: " for part in first["loc"])
        reason = where + first["msg"].removeprefix("Value error, ")
        raise UserError(f"spec {text!r}: {reason}; {HINT}") from None
