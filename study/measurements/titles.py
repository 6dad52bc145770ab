"""The titles of specs of quantization."""

from quant_eval.specs import parse_spec

ORDERS = {"actorder": "activation order", "groupaware": "group-aware order"}


def spec_title(spec: str) -> str:
    """Return a spec in words; what its name leaves out, the title does.

    >>> [spec_title(spec) for spec in ("gptq-b3-g32", "int8-t6")]
    ['GPTQ, 3 bits, groups of 32', 'LLM.int8(), threshold 6']
    """
    parsed = parse_spec(spec)
    defaults = parsed.row.defaults
    parts = ["GPTQ by gptqmodel" if parsed.method == "gptqmodel" else parsed.row.title]
    if len(parsed.row.bits) > 1:
        parts.append(f"{parsed.bits} bits")
    if "group_size" in defaults:
        parts.append(
            f"groups of {parsed.group_size}" if parsed.group_size else "one scale per channel"
        )
    if parsed.symmetric != defaults.get("symmetric"):
        parts.append("symmetric" if parsed.symmetric else "asymmetric")
    if parsed.order not in (None, "natural"):
        parts.append(ORDERS[parsed.order])
    if parsed.static_groups:
        parts.append("static groups")
    for option in ("damping", "alpha", "threshold"):
        value = getattr(parsed, option)
        if value != defaults.get(option):
            parts.append(f"{option} {value:g}")
    if parsed.scales == "fp16":
        parts.append("fp16 scales")
    return ", ".join(parts)
