"""The titles of specs of quantization."""

from collections.abc import Sequence

from quant_eval.specs import parse_spec


def spec_title(spec: str) -> str:
    """Return a spec in words; what its name leaves out, the title does.

    >>> [spec_title(spec) for spec in ("gptq-b3-g32", "int8-t6")]
    ['GPTQ, 3 bits, groups of 32', 'LLM.int8(), threshold 6']
    >>> spec_title("w4a4-g128-kv4-quarot")
    'RTN, 4 bits, groups of 128, activations 4 bits, KV cache 4 bits, QuaRot'
    """
    return parse_spec(spec).describe()


def shortened(specs: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return what the titles of specs have in common, and by title the rest of it.

    >>> shortened(["gptq-b4-g32", "gptq-b3-g32"])[0]
    'GPTQ, groups of 32'
    >>> shortened(["gptq-b4-g32", "gptq-b3-g32"])[1]["GPTQ, 3 bits, groups of 32"]
    '3 bits'
    """
    parts = {title: title.split(", ") for title in map(spec_title, specs)}
    first, *others = parts.values()
    common = [part for part in first if all(part in other for other in others)]
    # A single title is common to all: nothing is left of it to repeat.
    rest = {
        title: ", ".join(part for part in of_title if part not in common)
        for title, of_title in parts.items()
    }
    return ", ".join(common), rest
