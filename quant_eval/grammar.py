"""The one table of the parts of a spec's name, by which names are read and written.

A name begins with how weights are rounded: `gptq`, `nvfp4`, `gptq-nvfp4`, or `w4a4` for integers by
rounding to nearest with activations of so many bits. If weights stay as they are, it begins with
what is cast, such as `kv4`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from base.errors import UserError
from base.names import nearest
from quant_eval.casts.formats import FORMATS
from quant_eval.methods import METHODS
from quant_eval.transforms.rotations import LEARNING_STEPS, ROTATIONS

EXAMPLES = (
    "gptq-b3-g128, gptq-b4-perchannel-asym-actorder-damp0.01, gptqmodel-b4-g128-paper,"
    " gptaq-b3-g128, awq-b4-g128, autoround-b3-g128, rtn-b3-g32, int8-t6, nf4-g64,"
    " gptq-b4-g128-had, w4a4-g128-quarot, w8a8-smooth0.5, nvfp4, gptq-mxfp4-a16, fp8-astatic,"
    " ternary-g128, atom-b4-g128-keep0.03-a4, qtip-b2, kv4, gptq-b4-g128-a4-kv4-quarot"
)
# GPTQ as arXiv:2510.06213 ran it: the defaults of gptqmodel before version 5.
PAPER: dict[str, Any] = {
    "group_size": 128,
    "symmetric": True,
    "order": "actorder",
    "static_groups": False,
    "damping": 0.05,
}
_NUMBER = r"\d{1,3}(?:\.\d{1,6})?"
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """One part of a name, which follows a hyphen.

    Attributes:
        syntax: the part as the grammar shows it.
        pattern: regular expression of the part.
        read: returns the settings that a part states.
        write: returns the part for the values and the defaults of their method; "": none is
            needed.
    """

    syntax: str
    pattern: str
    read: Callable[[str], dict[str, Any]]
    write: Callable[[Values, Values], str]


def _numbered(label: str, option: str, number: Callable[[str], Any] = float) -> Part:
    """Return the part of a setting that is a number after a label."""

    def write(values: Values, defaults: Values) -> str:
        value = values[option]
        if value is None or value == defaults.get(option):
            return ""
        return label + (f"{value:.6f}".rstrip("0").rstrip(".") if number is float else str(value))

    pattern = label + (_NUMBER if number is float else r"\d{1,6}")
    return Part(
        f"{label}<number>", pattern, lambda text: {option: number(text[len(label) :])}, write
    )


def _chosen(option: str, words: Mapping[str, Any]) -> Part:
    """Return the part of a setting that is given by a word."""
    values_to_words = {value: word for word, value in words.items()}

    def write(values: Values, defaults: Values) -> str:
        value = values[option]
        return "" if value == defaults.get(option) else values_to_words.get(value, "")

    return Part("|".join(words), "|".join(words), lambda text: {option: words[text]}, write)


def _write_bits(values: Values, _: Values) -> str:
    is_stated = len(METHODS[values["method"]].bits) > 1 and values["format"] == "int"
    return f"b{values['bits']}" if is_stated else ""


def _write_group(values: Values, defaults: Values) -> str:
    if "group_size" not in defaults or _fixed_grouping(values) is not None:
        return ""
    size = values["group_size"]
    if size is None and _is_short(values):
        return ""
    return f"g{size}" if size else "perchannel"


def _write_activations(values: Values, _: Values) -> str:
    activations = values["activations"]
    if activations == _own_activations(values) or _is_short(values):
        return ""
    return "a" + (activations.removeprefix("int") if activations else "16")


def _read_rotation(text: str) -> dict[str, Any]:
    name = text.rstrip("0123456789")
    block = text.removeprefix(name)
    return {"rotation": name, "rotation_block": int(block) if block else None}


def _write_rotation(values: Values, _: Values) -> str:
    return f"{values['rotation'] or ''}{values['rotation_block'] or ''}"


_ROTATIONS = "|".join(
    rf"{name}(?:[1-9]\d{{0,5}})?" if row.takes_block else name
    for name, row in sorted(ROTATIONS.items(), reverse=True)  # the longer of two first
)
_CASTS = "|".join(("[2-8]", *(name for name, row in FORMATS.items() if row.is_cast)))


def _cast(text: str) -> str:
    return f"int{text}" if text.isdigit() else text


PARTS = (
    Part("b<bits>", r"b\d{1,2}", lambda text: {"bits": int(text[1:])}, _write_bits),
    Part(
        "g<group size>|perchannel",
        r"g\d{1,6}|perchannel",
        lambda text: {"group_size": int(text[1:]) if text.startswith("g") else None},
        _write_group,
    ),
    _chosen("symmetric", {"sym": True, "asym": False}),
    _chosen("order", {"natural": "natural", "actorder": "actorder", "groupaware": "groupaware"}),
    _chosen("static_groups", {"static": True}),
    _numbered("damp", "damping"),
    _numbered("alpha", "alpha"),
    _numbered("t", "threshold"),
    _numbered("keep", "kept"),
    _numbered("l", "states", int),
    _chosen("scales", {"s16": "fp16"}),
    Part(
        "a<bits or format>",
        f"a(?:16|{_CASTS})",
        lambda text: {"activations": None if text == "a16" else _cast(text[1:])},
        _write_activations,
    ),
    _chosen("static_activations", {"astatic": True}),
    Part(
        "kv<bits>|kvfp8",
        "kv(?:[2-8]|fp8)",
        lambda text: {"kv": _cast(text[2:])},
        lambda values, _: f"kv{values['kv'].removeprefix('int')}" if values["kv"] else "",
    ),
    _chosen("shift", {"baseq": True}),
    _numbered("smooth", "smooth"),
    Part(
        "|".join(
            name + ("[<block>]" if row.takes_block else "") for name, row in ROTATIONS.items()
        ),
        _ROTATIONS,
        _read_rotation,
        _write_rotation,
    ),
    _numbered("i", "iterations", int),
)
_HEADS = (
    f"{'|'.join(name for name in METHODS if name != 'none')}|[gptq-]({'|'.join(FORMATS)})"
    "|w<bits>a<bits>"
)
GRAMMAR = f"({_HEADS})" + "".join(f"[-{part.syntax}]" for part in PARTS)
HINT = (
    "for example gptq-b3-g128 or w4a4-g128-quarot; 'python -m quant_eval methods' lists what a spec"
    " can be"
)


def _fixed_grouping(values: Values) -> int | None:
    """Return the group size of a format that has its own, 0 for a whole row."""
    return FORMATS[values["format"]].grouping if values["format"] in FORMATS else None


def _own_activations(values: Values) -> str | None:
    """Return what activations are cast to if a name does not say: as weights of such a format."""
    row = FORMATS.get(values["format"])
    return values["format"] if row and row.is_cast else None


def _is_short(values: Values) -> bool:
    """Return whether a name begins with w<bits>a<bits>."""
    cast = values["activations"] or ""
    return values["method"] == "rtn" and values["format"] == "int" and cast.startswith("int")


def defaults_of(values: Values) -> dict[str, Any]:
    """Return what a method's settings mean where a name leaves them out."""
    defaults = dict(METHODS[values["method"]].defaults)
    if values.get("rotation") and ROTATIONS[values["rotation"]].is_learned:
        defaults["iterations"] = LEARNING_STEPS
    return defaults


def write_name(values: Values) -> str:
    """Return the shortest name of these settings."""
    method, defaults = values["method"], defaults_of(values)
    head = [] if method == "none" else [method]
    if values["format"] != "int":
        head = [values["format"]] if method == "rtn" else [method, values["format"]]
    if _is_short(values):
        head = [f"w{values['bits']}a{values['activations'].removeprefix('int')}"]
    parts = [part.write(values, defaults) for part in PARTS]
    if _is_short(values):
        parts = parts[1:]  # the head says the bits
    if method == "gptqmodel" and PAPER.items() <= values.items():
        parts = [*parts[:2], "paper"]
    return "-".join(filter(None, [*head, *parts]))


def read_name(text: str) -> dict[str, Any]:
    """Return the settings of a name, what it leaves out at its default.

    UserError with the grammar for anything that is not a name; `QuantSpec` checks which values
    fit together.
    """
    settings, rest = _read_head(text)
    settings |= _read_parts(text, rest)

    # parts that this format or method does not take, or needs
    method = METHODS[settings["method"]]
    row = FORMATS.get(settings.get("format", "int"))  # type: ignore[call-overload]
    problem = None
    if row and "bits" in settings:
        problem = f"{settings['format']} has {row.bits} bits; leave -b out"
    elif row and row.grouping is not None and "group_size" in settings:
        problem = f"{settings['format']} has its own groups; leave -g and -perchannel out"
    elif not row and len(method.bits) > 1 and "bits" not in settings:
        problem = f"{settings['method']} needs its bits"
    elif "group_size" in method.defaults and "group_size" not in settings:
        if row and row.grouping is not None:
            settings["group_size"] = row.grouping or None
        else:
            problem = f"{text.split('-')[0]} needs a group size or perchannel"
    if problem:
        raise UserError(f"spec {text!r}: {problem}; {HINT}")

    values = {"bits": row.bits if row else method.bits[0], "format": "int"} | settings
    if "activations" not in settings:
        values["activations"] = _own_activations(values)
    return defaults_of(values) | values


def _read_head(text: str) -> tuple[dict[str, Any], str]:
    """Return what the beginning of a name says, and its rest from the first hyphen on."""
    formats, methods = "|".join(FORMATS), "|".join(METHODS)
    if short := re.match(r"w([2-8])a([2-8])(?=-|$)", text, re.ASCII):
        cast = {"bits": int(short[1]), "activations": f"int{short[2]}"}
        is_grouped = re.search(r"-(g\d|perchannel)", text)
        whole_rows = {} if is_grouped else {"group_size": None}
        return {"method": "rtn"} | cast | whole_rows, text[short.end() :]
    if plain := re.match(rf"({formats})(?=-|$)", text):
        return {"method": "rtn", "format": plain[1]}, text[plain.end() :]
    if named := re.match(rf"({methods})(?:-({formats}))?(?=-|$)", text):
        form = {"format": named[2]} if named[2] else {}
        return {"method": named[1]} | form, text[named.end() :]
    return {"method": "none"}, f"-{text}"


def _read_parts(text: str, rest: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if match := re.fullmatch(r"((?:-[bg]\d{1,6})*)-paper", rest, re.ASCII):
        settings, rest = _read_parts(text, match[1]), ""
        if not text.startswith("gptqmodel-") or settings.get("group_size") != 128:
            raise UserError(
                f"spec {text!r}: paper stands for all settings of gptqmodel but bits, in groups of"
                f" 128; {HINT}"
            )
        return settings | PAPER
    for part in PARTS:
        if match := re.match(rf"-({part.pattern})(?=-|$)", rest, re.ASCII):
            settings |= part.read(match[1])
            rest = rest[match.end() :]
    if rest:
        raise UserError(f"{_problem(text, rest)}; {HINT}")
    return settings


def _problem(text: str, rest: str) -> str:
    """Return what is wrong with a name whose end could not be read."""
    for part in PARTS:
        if match := re.match(rf"-({part.pattern})(?=-|$)", rest, re.ASCII):
            before = re.search(rf"-({part.pattern})(?=-)", text[: -len(rest)] + "-", re.ASCII)
            if before:
                return f"spec {text!r}: {before[1]} and {match[1]} do not compose; give one"
            return f"spec {text!r}: {match[1]} comes too late; keep the order of the parts"
    if rest == f"-{text}":
        method, hyphen, parts = text.partition("-")
        near = nearest(method, (*METHODS, *FORMATS))
        return f"unknown spec {text!r}" + (f"; did you mean {near}{hyphen}{parts}?" if near else "")
    return f"spec {text!r}: {rest[1:]!r} is not understood"
