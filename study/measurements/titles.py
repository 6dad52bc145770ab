"""The titles of specs of quantization."""

from quant_eval.specs import parse_spec


def spec_title(spec: str) -> str:
    """Return a spec in words; what its name leaves out, the title does.

    >>> [spec_title(spec) for spec in ("gptq-b3-g32", "int8-t6")]
    ['GPTQ, 3 bits, groups of 32', 'LLM.int8(), threshold 6']
    >>> spec_title("w4a4-g128-kv4-quarot")
    'RTN, 4 bits, groups of 128, activations 4 bits, KV cache 4 bits, QuaRot'
    """
    return parse_spec(spec).describe()
