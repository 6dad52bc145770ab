"""Names of specs: a quantization setting is one frozen value with one name.

A name begins with how weights are rounded: `gptq`, `nvfp4`, `gptq-nvfp4`, or `w4a4` for integers by
rounding to nearest with activations of so many bits. If weights stay as they are, it begins with
what is cast, such as `kv4`. One part for each setting follows, in the order of `parts_of`.
"""

import re
from functools import cache
from typing import Any

from pydantic import ValidationError

from base.errors import UserError
from base.names import nearest
from quant_eval.formats import FORMATS
from quant_eval.quantizer import CASTS, TRANSFORMS, QuantSpec, parts_of
from quant_eval.quantizers import BY_METHOD, QUANTIZERS
from quant_eval.quantizers.rtn import RTN
from quant_eval.quantizers.unrounded import Unrounded

EXAMPLES = (
    "gptq-b3-g128, gptq-b4-perchannel-asym-actorder-damp0.01, gptqmodel-b4-g128-paper,"
    " gptaq-b3-g128, awq-b4-g128, autoround-b3-g128, rtn-b3-g32, int8-t6, nf4-g64,"
    " gptq-b4-g128-had, w4a4-g128-quarot, w8a8-smooth0.5, nvfp4, gptq-mxfp4-a16, fp8-astatic,"
    " ternary-g128, atom-b4-g128-keep0.03-a4, qtip-b2, kv4, gptq-b4-g128-a4-kv4-quarot"
)
METHODS_COMMAND = "'python -m quant_eval methods'"
HINT = f"for example gptq-b3-g128 or w4a4-g128-quarot; {METHODS_COMMAND} lists what a spec can be"
BITS = re.compile(r"-(?:w|int)?(\d)-?(?:bits?)?(?=-|$)")  # as other programs write them
_METHODS, _FORMATS = "|".join(BY_METHOD), "|".join(FORMATS)

Settings = dict[str, Any]


class _RefusedNameError(Exception):
    """The reason for which a text is no name."""


@cache
def parse_spec(text: str) -> QuantSpec:
    """Return the spec of a name.

    UserError with the grammar for a text that is not a name.

    >>> parse_spec("gptq-b3-g32-sym-damp0.05").name
    'gptq-b3-g32'
    >>> parse_spec("rtn-b4-g128-a4-quarot").name
    'w4a4-g128-quarot'
    """
    try:
        kind, head, rest = _read_head(text)
        parts = _read_parts(kind, text, rest)
        return kind.model_validate(_completed(kind, text, head, parts))
    except ValidationError as error:
        problem = _problem_of_value(error, kind)
    except _RefusedNameError as error:
        problem = str(error)
    raise UserError(f"spec {text!r}: {problem}; {HINT}")


def weight_grid(text: str) -> RTN:
    """Return the grid of a name that says to round weights to nearest, and nothing else.

    UserError with the name to write instead, where there is one.

    >>> weight_grid("mxfp4-a16").format
    'mxfp4'
    """
    spec = parse_spec(text)
    if not isinstance(spec, RTN):
        raise UserError(
            f"spec {text!r} does not round to nearest; give for example rtn-b3-g128 or mxfp4-a16"
        )
    changes_more = {name: RTN.model_fields[name].default for name in (*CASTS, *TRANSFORMS)}
    alone = spec.model_copy(update=changes_more).name
    # One spelling for each: it is a part of the identity of a run.
    if text != alone:
        raise UserError(f"spec {text!r} is not the name of a grid of weights alone; write {alone}")
    return spec


def _read_head(text: str) -> tuple[type[QuantSpec], Settings, str]:
    """Return what the beginning of a name says, and its rest from the first hyphen on."""
    if short := re.match(r"w([2-8])a([2-8])(?=-|$)", text, re.ASCII):
        cast = {"bits": int(short[1]), "activations": f"int{short[2]}"}
        return RTN, cast, text[short.end() :]
    if plain := re.match(rf"({_FORMATS})(?=-|$)", text):
        return RTN, {"format": plain[1]}, text[plain.end() :]
    if named := re.match(rf"({_METHODS})(?:-({_FORMATS}))?(?=-|$)", text):
        kind, form = BY_METHOD[named[1]], named[2]
        if form and "format" not in kind.model_fields:
            with_formats = [each.method for each in QUANTIZERS if "format" in each.model_fields]
            raise _RefusedNameError(
                f"{named[1]} does not round to {form}; give {' or '.join(with_formats)}"
            )
        return kind, {"format": form} if form else {}, text[named.end() :]
    # With a hyphen in front, all of the text reads as parts, such as -kv4.
    return Unrounded, {}, f"-{text}"


def _read_parts(kind: type[QuantSpec], text: str, rest: str) -> Settings:
    """Return the settings that the parts of a name state, each once and in their order."""
    for word, meaning in kind.abbreviations.items():
        # The word comes last, after bits and groups alone: it stands for everything else.
        if match := re.fullmatch(rf"((?:-[bg]\d{{1,6}})*)-{word}", rest, re.ASCII):
            settings = _read_parts(kind, text, match[1])
            size = meaning["group_size"]
            if settings.get("group_size") != size:
                raise _RefusedNameError(
                    f"{word} stands for all settings of {kind.method} but bits, in groups of {size}"
                )
            return settings | dict(meaning)
    settings = {}
    for field, part in parts_of(kind).items():
        if match := re.match(rf"-({part.pattern})(?=-|$)", rest, re.ASCII):
            settings |= part.read(field, match[1])
            rest = rest[match.end() :]
    if rest:
        raise _unread(kind, text, rest)
    return settings


def _completed(kind: type[QuantSpec], text: str, head: Settings, parts: Settings) -> Settings:
    """Return all settings of a name, of which neither bits nor groups may be missing or double."""
    row = FORMATS.get(head.get("format", "int"))
    if row and "bits" in parts:
        raise _RefusedNameError(f"{head['format']} has {row.bits} bits; leave -b out")
    if row and row.grouping is not None and "group_size" in parts:
        raise _RefusedNameError(
            f"{head['format']} has its own groups; leave -g and -perchannel out"
        )
    # What a name leaves out depends on what it states: a format brings its bits and groups.
    settings = kind.implied(head | parts) | head | parts
    if "activations" in head:  # of w4a4, which needs no groups
        settings.setdefault("group_size", None)
    if "bits" not in settings:
        raise _RefusedNameError(f"{kind.method} needs its bits")
    if "group_size" in kind.model_fields and "group_size" not in settings:
        raise _RefusedNameError(f"{text.split('-')[0]} needs a group size or perchannel")
    return settings


def _unread(kind: type[QuantSpec], text: str, rest: str) -> Exception:
    """Return what is wrong with a name whose end could not be read."""
    for part in parts_of(kind).values():
        if match := re.match(rf"-({part.pattern})(?=-|$)", rest, re.ASCII):
            # The same setting was read before, perhaps by another word.
            before = re.search(rf"-({part.pattern})(?=-)", text[: -len(rest)] + "-", re.ASCII)
            if before:
                return _RefusedNameError(f"{before[1]} and {match[1]} do not compose; give one")
            return _RefusedNameError(f"{match[1]} comes too late; keep the order of the parts")
    # Nothing was read, not even a method.
    if rest == f"-{text}":
        method, hyphen, parts = text.partition("-")
        near = nearest(method, (*BY_METHOD, *FORMATS))
        advice = f"did you mean {near}{hyphen}{parts}? Else see {METHODS_COMMAND}" if near else HINT
        return UserError(f"unknown spec {text!r}; {advice}")
    for other in QUANTIZERS:
        for field, part in parts_of(other).items():
            if re.match(rf"-({part.pattern})(?=-|$)", rest, re.ASCII):
                return _RefusedNameError(f"{kind.method} does not take {field}")
    if bits := BITS.match(rest):
        return _RefusedNameError(
            f"{bits[0][1:]!r} is not understood, {bits[1]} bits are b{bits[1]}"
        )
    return _RefusedNameError(f"{rest[1:]!r} is not understood")


def _problem_of_value(error: ValidationError, kind: type[QuantSpec]) -> str:
    """Return the first problem that the values of a name have."""
    first = error.errors()[0]
    where = "".join(f"{part}: " for part in first["loc"])
    if first["type"] == "missing":
        return f"{kind.method} needs {first['loc'][0]}"
    return where + first["msg"].removeprefix("Value error, ")
