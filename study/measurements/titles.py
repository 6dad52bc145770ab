"""The titles of specs of quantization."""

from quant_eval.casts.formats import FORMATS
from quant_eval.specs import QuantSpec, parse_spec
from quant_eval.transforms.rotations import ROTATIONS

ORDERS = {"actorder": "activation order", "groupaware": "group-aware order"}


def spec_title(spec: str) -> str:
    """Return a spec in words; what its name leaves out, the title does.

    >>> [spec_title(spec) for spec in ("gptq-b3-g32", "int8-t6")]
    ['GPTQ, 3 bits, groups of 32', 'LLM.int8(), threshold 6']
    >>> spec_title("w4a4-g128-kv4-quarot")
    'RTN, 4 bits, groups of 128, activations 4 bits, KV cache 4 bits, QuaRot'
    """
    parsed = parse_spec(spec)
    defaults = parsed.row.defaults
    parts = _weights(parsed)
    if parsed.symmetric != defaults.get("symmetric"):
        parts.append("symmetric" if parsed.symmetric else "asymmetric")
    if parsed.order not in (None, "natural"):
        parts.append(ORDERS[parsed.order])
    if parsed.static_groups:
        parts.append("static groups")
    for option in ("damping", "alpha", "threshold", "kept", "states"):
        value = getattr(parsed, option)
        if value != defaults.get(option):
            parts.append(f"{option} {value:g}")
    if parsed.scales == "fp16":
        parts.append("fp16 scales")
    return ", ".join(parts + _casts(parsed) + _transforms(parsed))


def _weights(spec: QuantSpec) -> list[str]:
    """Return the method, with format or bits, and the groups where it has no own."""
    defaults, form = spec.row.defaults, FORMATS.get(spec.format)
    title = "GPTQ by gptqmodel" if spec.method == "gptqmodel" else spec.row.title
    if form:
        title = form.title if spec.method == "rtn" else f"{title} to {form.title}"
    parts = [title]
    if len(spec.row.bits) > 1 and not form:
        parts.append(f"{spec.bits} bits")
    if "group_size" in defaults and (form is None or form.grouping is None):
        parts.append(f"groups of {spec.group_size}" if spec.group_size else "one scale per channel")
    return parts


def _casts(spec: QuantSpec) -> list[str]:
    parts = []
    form = FORMATS.get(spec.format)
    if spec.activations:
        numbers = "as weights" if spec.activations == spec.format else _number(spec.activations)
        parts.append(f"activations {numbers}" + (", static" if spec.static_activations else ""))
    elif form and form.is_cast:
        parts.append("weights only")
    if spec.kv:
        parts.append(f"KV cache {_number(spec.kv)}")
    return parts


def _number(cast: str) -> str:
    row = FORMATS.get(cast)  # type: ignore[call-overload]
    return row.title if row else f"{cast.removeprefix('int')} bits"


def _transforms(spec: QuantSpec) -> list[str]:
    parts = ["mean shift"] if spec.shift else []
    if spec.smooth is not None:
        parts.append(f"SmoothQuant {spec.smooth:g}")
    if spec.rotation:
        block = f" of {spec.rotation_block}" if spec.rotation_block else ""
        parts.append(ROTATIONS[spec.rotation].title + block)
    return parts
