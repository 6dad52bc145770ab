"""The base of every quantizer: `quantizers` has the table, `specs` the names.

A quantizer is a frozen class: its fields are its settings, each with the part of a name that states
it; its constants are its title and source, and what the rest of the project asks about it; its
`round` rounds weights. Imports no torch, which takes seconds: `round` does.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from base.errors import UserError
from base.frozen import Frozen
from quant_eval.formats import FORMATS, Format
from quant_eval.grammar import Part, choice, number
from quant_eval.group import LinearGroup, RoundedGroup
from quant_eval.rotations import LEARNING_STEPS, ROTATIONS, RotationName

Order = Literal["natural", "actorder", "groupaware"]
Integers = Literal["int2", "int3", "int4", "int5", "int6", "int7", "int8"]

# What a spec can say besides how weights are rounded; a quantizer names those that it takes.
CACHE = ("kv",)
CASTS = ("activations", "static_activations", *CACHE)
TRANSFORMS = ("shift", "smooth", "rotation", "rotation_block")

COMPRESSED = "compressed-tensors"  # formats of checkpoints
GPTQ_FORMAT = "GPTQ"


def _cast_of(text: str) -> str:
    return f"int{text}" if text.isdigit() else text


def _number_words(cast: str) -> str:
    row = FORMATS.get(cast)  # type: ignore[call-overload]
    return row.title if row else f"{cast.removeprefix('int')} bits"


_CAST_PATTERN = "|".join(("[2-8]", *(name for name, row in FORMATS.items() if row.is_cast)))
_BITS = Part(
    "b<bits>", r"b\d{1,2}", lambda part: int(part[1:]), lambda bits: f"b{bits}", "{} bits".format
)
_GROUP = Part(
    syntax="g<group size>|perchannel",
    pattern=r"g\d{1,6}|perchannel",
    value=lambda part: int(part[1:]) if part.startswith("g") else None,
    text=lambda size: f"g{size}" if size else "perchannel",
    words=lambda size: f"groups of {size}" if size else "one scale per channel",
)
_ACTIVATIONS = Part(
    syntax="a<bits or format>",
    pattern=f"a(?:16|{_CAST_PATTERN})",
    value=lambda part: None if part == "a16" else _cast_of(part[1:]),
    text=lambda cast: "a" + (cast.removeprefix("int") if cast else "16"),
    words=lambda cast: f"activations {_number_words(cast)}",
)
_CACHE = Part(
    syntax="kv<bits>|kvfp8",
    pattern="kv(?:[2-8]|fp8)",
    value=lambda part: _cast_of(part[2:]),
    text=lambda cast: f"kv{cast.removeprefix('int')}",
    words=lambda cast: f"KV cache {_number_words(cast)}",
)


class _RotationPart(Part):
    """A rotation and, without a hyphen, the width of its blocks."""

    def read(self, field: str, text: str) -> dict[str, Any]:
        # No name of a rotation ends in a digit, so the digits are the width.
        name = text.rstrip("0123456789")
        block = text.removeprefix(name)
        return {field: name, "rotation_block": int(block) if block else None}

    def write(self, field: str, values: Mapping[str, Any]) -> str:
        return f"{values[field]}{values['rotation_block'] or ''}"


_ROTATION = _RotationPart(
    syntax="|".join(
        name + ("[<block>]" if row.takes_block else "") for name, row in ROTATIONS.items()
    ),
    pattern="|".join(
        rf"{name}(?:[1-9]\d{{0,5}})?" if row.takes_block else name
        for name, row in sorted(ROTATIONS.items(), reverse=True)  # the longer of two first
    ),
    value=str,
    text=str,
    words=lambda name: ROTATIONS[name].title,
)

# Settings that several quantizers have.
GroupSize = Annotated[
    int | None,
    _GROUP,
    Field(ge=2, description="inputs that share a scale; None: a whole row does"),
]
Symmetric = Annotated[
    bool,
    choice({"sym": True, "asym": False}, {True: "symmetric", False: "asymmetric"}),
    Field(description="zero point fixed at 2^(bits - 1), or fitted per group"),
]
RoundingOrder = Annotated[
    Order,
    choice(
        {"natural": "natural", "actorder": "actorder", "groupaware": "groupaware"},
        {
            "natural": "natural order",
            "actorder": "activation order",
            "groupaware": "group-aware order",
        },
    ),
    Field(description="in which columns are rounded"),
]
StaticGroups = Annotated[
    bool,
    choice({"static": True}, {True: "static groups"}),
    Field(description="grids fitted before any column is rounded"),
]
Damping = Annotated[
    float,
    number("damp", "damping {:g}"),
    Field(ge=0, le=1, description="added to the Hessian's diagonal, x its mean"),
]
Iterations = Annotated[
    int | None, number("i", "", int), Field(ge=1, description="steps of what is learned")
]


class QuantSpec(Frozen):
    """The settings of a quantization of the decoder blocks' linears and their KV cache.

    Class attributes:
        method: how names begin.
        title: what a figure calls it.
        source: paper, and which implementation.
        library: whose code rounds the weights.
        widths: the bits that it takes.
        is_calibrated: whether its result depends on the calibration text, whatever is cast.
        extras: which of CASTS and TRANSFORMS a spec of it can say.
        saved: formats of checkpoints that can hold its codes.
        rounds_weights: False where weights stay as they are.
        casts_inputs: whether its modules round inputs, by what else is in the batch.
        folds: whether it moves scales between linears, so that one by itself means nothing.
        module: of `quant_eval.libraries`, which runs another project's library in its own process.
        architectures: classes of models whose weights the library rounds right; None: all.
        abbreviations: words of a name, after bits and groups, that stand for all settings.
    """

    method: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    library: ClassVar[str] = "quantdyn"
    widths: ClassVar[tuple[int, ...]] = tuple(range(2, 9))
    is_calibrated: ClassVar[bool] = True
    extras: ClassVar[tuple[str, ...]] = ()
    saved: ClassVar[tuple[str, ...]] = ()
    rounds_weights: ClassVar[bool] = True
    casts_inputs: ClassVar[bool] = False
    folds: ClassVar[bool] = False
    module: ClassVar[str | None] = None
    architectures: ClassVar[tuple[str, ...] | None] = None
    abbreviations: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    bits: Annotated[int, _BITS] = Field(ge=1, le=16)
    scales: Annotated[
        Literal["fp32", "fp16"] | None, choice({"s16": "fp16"}, {"fp16": "fp16 scales"})
    ] = Field(default=None, description="fp16: as a checkpoint in GPTQ's format holds them")
    activations: Annotated[Integers | Format | None, _ACTIVATIONS] = Field(
        default=None, description="numbers that the inputs of linears are cast to, token by token"
    )
    static_activations: Annotated[bool, choice({"astatic": True}, {True: "static"})] = Field(
        default=False, description="one scale per tensor, from the calibration text"
    )
    kv: Annotated[Integers | Literal["fp8"] | None, _CACHE] = Field(
        default=None, description="numbers that keys and values are cast to"
    )
    shift: Annotated[bool, choice({"baseq": True}, {True: "mean shift"})] = Field(
        default=False, description="the inputs' means are taken off before a cast"
    )
    smooth: Annotated[float | None, number("smooth", "SmoothQuant {:g}")] = Field(
        default=None, ge=0, le=1, description="SmoothQuant's alpha: the inputs' share of the scales"
    )
    rotation: Annotated[RotationName | None, _ROTATION] = Field(
        default=None, description="of the inputs of linears"
    )
    rotation_block: int | None = Field(
        default=None, ge=2, description="inputs that are rotated together; None: the whole width"
    )
    iterations: Iterations = None

    def round(self, group: LinearGroup) -> RoundedGroup:
        """Return the group's weights after rounding.

        Every rank has to call it. UserError if the weights or the Hessian do not fit.
        """
        raise NotImplementedError

    def check_sizes(self, name: str, shape: tuple[int, int]) -> None:
        """Raise UserError where a linear's outputs and inputs do not fit."""

    @property
    def name(self) -> str:
        """The shortest name of this value: defaults are left out."""
        values = dict(self)
        head, stated = self._head()
        implied = self.implied(values) | stated
        parts = {
            field: part.write(field, values)
            for field, part in parts_of(type(self)).items()
            if field not in implied or values[field] != implied[field]
        }
        for word, meaning in self.abbreviations.items():
            if meaning.items() <= values.items():
                # One word in place of all the parts that it stands for.
                parts = {"bits": parts["bits"], "group_size": parts["group_size"], "": word}
        return "-".join(filter(None, (head, *parts.values())))

    def _head(self) -> tuple[str, dict[str, Any]]:
        """Return the beginning of the name, and settings it states or makes the default."""
        return self.method, {}

    @classmethod
    def implied(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the settings are that a name leaves out, beside these."""
        fields = cls.model_fields.items()
        implied = {name: info.default for name, info in fields if not info.is_required()}
        if len(cls.widths) == 1:
            implied["bits"] = cls.widths[0]
        if row := FORMATS.get(values.get("format", "int")):
            implied["bits"] = row.bits
            if row.grouping is not None:
                implied["group_size"] = row.grouping or None
            if row.is_cast:
                implied["activations"] = values["format"]
        if (rotation := values.get("rotation")) and ROTATIONS[rotation].is_learned:
            implied["iterations"] = LEARNING_STEPS
        return implied

    def settings(self) -> dict[str, Any]:
        """Return the method and its settings, as results hold them."""
        return {"method": self.method, "format": "int"} | self.model_dump(mode="json")

    def describe(self) -> str:
        """Return the quantization in words; what its name leaves out, this does."""
        values = dict(self)
        implied = self.implied(values)
        words = [self._title()]
        for field, part in parts_of(type(self)).items():
            if field == "activations":
                words.append(self.activation_words(part))
            elif field not in implied or values[field] != implied[field]:
                words.append(part.words(values[field]))
                if field == "rotation" and self.rotation_block:
                    words[-1] += f" of {self.rotation_block}"
        return ", ".join(filter(None, words))

    def _title(self) -> str:
        return self.title

    def activation_words(self, part: Part) -> str:
        """Return the cast of activations in words."""
        return part.words(self.activations) if self.activations else ""

    @property
    def casts(self) -> bool:
        """True if more than weights is rounded, so that no weights alone reproduce it."""
        return self.casts_inputs or bool(self.activations or self.kv)

    @property
    def rounds_linears(self) -> bool:
        """True if weights or inputs of linears are rounded, not the KV cache alone."""
        return self.rounds_weights or bool(self.activations)

    @property
    def is_transformed(self) -> bool:
        """True if linears read other inputs than the model's."""
        return bool(self.shift or self.smooth is not None or self.rotation)

    @property
    def needs_equal_lengths(self) -> bool:
        """It is learned on calibration sequences, which have to be of one length."""
        return bool(self.rotation and ROTATIONS[self.rotation].is_learned)

    @property
    def needs_calibration(self) -> bool:
        """True if the result depends on the calibration text."""
        is_fitted = bool(self.rotation and ROTATIONS[self.rotation].needs_calibration)
        has_fixed_scales = self.activations == "nvfp4" or self.static_activations
        has_fixed_scales |= self.kv == "fp8"
        is_fitted |= self.shift or self.smooth is not None or has_fixed_scales
        return self.is_calibrated or is_fitted

    @model_validator(mode="after")
    def _is_taken(self) -> Self:
        """Refuse bits and extras that the quantizer does not take."""
        self.check_bits()
        learns = bool(self.rotation and ROTATIONS[self.rotation].is_learned)
        taken = (*self.extras, "iterations") if learns else self.extras
        for option in QuantSpec.model_fields:
            default = type(self).model_fields[option].default
            # A default of its own, such as 200 iterations of AutoRound, says that a quantizer has
            # the setting.
            has_it = option in taken or default not in (None, False)
            if option != "bits" and getattr(self, option) != default and not has_it:
                raise ValueError(f"{self.method} does not take {option}")
        if learns and self.iterations is None:
            raise ValueError(f"{self.method} needs iterations")
        return self

    def check_bits(self) -> None:
        """Raise ValueError for a width that the quantizer does not take."""
        if self.bits not in self.widths:
            raise ValueError(
                f"{self.method} takes {', '.join(map(str, self.widths))} bits, not {self.bits}"
            )

    @model_validator(mode="after")
    def _casts_and_transforms_fit(self) -> Self:
        if not self.rounds_linears and not self.kv:
            raise ValueError("nothing is rounded; give a method, -a or -kv")
        if self.scales == "fp16" and (self.casts or self.is_transformed):
            raise ValueError("-s16 is for weights alone, as GPTQ's format holds them; leave it out")
        if self.static_activations and not self.activations:
            raise ValueError("astatic is for activations; give -a as well")
        if self.static_activations and self.activations not in ("int8", "fp8", "fp8e5m2"):
            raise ValueError("one scale per tensor is for 8 bits: give -a8 or -afp8")
        if self.shift and not self.activations:
            raise ValueError("baseq shifts what is cast; give -a, such as -a4")
        if (
            self.is_transformed
            and not self.rounds_linears
            and self.rotation not in ("quarot", "quarot-fused")
        ):
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


class GroupSpec(QuantSpec):
    """A quantizer with scales of groups of inputs."""

    group_size: GroupSize

    def check_sizes(self, name: str, shape: tuple[int, int]) -> None:
        """Raise UserError where groups do not divide the inputs."""
        inputs = shape[1]
        if self.group_size is not None and inputs % self.group_size:
            raise UserError(
                f"group size {self.group_size} does not divide the {inputs} input features of"
                f" {name}; choose a divisor, or perchannel"
            )


class GridSpec(GroupSpec):
    """Rounding to the points of a grid: integers, or the numbers of a format."""

    extras = ("scales", *CASTS, *TRANSFORMS)
    saved = (COMPRESSED, GPTQ_FORMAT)

    format: Format = Field(default="int", description="numbers that weights are rounded to")
    symmetric: Symmetric = True
    scales: Annotated[Literal["fp32", "fp16"], choice({"s16": "fp16"}, {"fp16": "fp16 scales"})] = (
        Field(default="fp32", description="fp16: as a checkpoint in GPTQ's format holds them")
    )

    @property
    def groups_are_ranges(self) -> bool:
        """True if the inputs that share a scale are neighbours."""
        return True

    @property
    def scales_tensors(self) -> bool:
        """True if one scale is of all linears that read the same input."""
        return self.format == "nvfp4" or self.static_activations

    def _head(self) -> tuple[str, dict[str, Any]]:
        return (self.method if self.format == "int" else f"{self.method}-{self.format}"), {}

    def _title(self) -> str:
        row = FORMATS.get(self.format)
        return f"{self.title} to {row.title}" if row else self.title

    def activation_words(self, part: Part) -> str:
        """Return the cast of activations in words, beside that of the weights."""
        row = FORMATS.get(self.format)
        if row and row.is_cast and self.activations in (None, self.format):
            return "activations as weights" if self.activations else "weights only"
        return super().activation_words(part)

    def check_bits(self) -> None:
        """Raise ValueError for a width of integers that the quantizer does not take."""
        if self.format == "int":  # another format says its bits
            super().check_bits()

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        row = FORMATS.get(self.format)
        if row and row.grouping is not None and self.group_size != (row.grouping or None):
            raise ValueError(f"{self.format} has its own groups")
        if row and (not self.symmetric or self.scales == "fp16"):
            raise ValueError(f"{self.format} has its own scales; leave -asym and -s16 out")
        return self


class ColumnSpec(GridSpec):
    """Rounding column after column, by GPTQ."""

    order: RoundingOrder = "natural"
    static_groups: StaticGroups = False
    damping: Damping = 0.05

    @property
    def groups_are_ranges(self) -> bool:
        """True if the inputs that share a scale are neighbours.

        With `actorder` groups are formed along the order, unless they are fitted before.
        """
        return self.order != "actorder" or self.static_groups

    @model_validator(mode="after")
    def _order_fits(self) -> Self:
        check_order(self.order, self.static_groups, self.group_size)
        return self


def check_order(order: Order, static_groups: bool, group_size: int | None) -> None:
    """Raise ValueError for an order that does not fit the groups."""
    if order == "groupaware" and group_size is None:
        raise ValueError("groupaware orders groups: give a group size, or use actorder")
    if static_groups and order == "groupaware":
        raise ValueError(
            "static groups are for natural order and actorder; groupaware keeps groups whole anyway"
        )


@cache
def parts_of(kind: type[QuantSpec]) -> dict[str, Part]:
    """Return the parts of a quantizer's names, by field, in their order.

    Bits come first and then the settings of the quantizer alone; what all can have comes last.
    """
    common = [name for name in QuantSpec.model_fields if name != "bits"]
    particular = [name for name in kind.model_fields if name not in QuantSpec.model_fields]
    return {
        name: part
        for name in ("bits", *particular, *common)
        for part in kind.model_fields[name].metadata
        if isinstance(part, Part)
    }
