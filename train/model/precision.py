"""Precisions of training: the numbers of weights, and of the factors of matrix products."""

from typing import Literal

Precision = Literal["fp32", "bf16", "fp8", "fp8_blockwise", "mxfp8"]

# By the precisions whose matrix products round their factors to 8 bits: megatron-core's names of
# the format and of the recipe, which says what numbers share a scale. Each scales by the current
# maximum: no scaling history has to be saved, and a rejected step leaves no trace in one.
# Formats are those of Transformer Engine's defaults; hybrid is e4m3 and, for gradients, e5m2.
FP8_RECIPES: dict[str, tuple[str, str]] = {
    "fp8": ("hybrid", "tensorwise"),
    "fp8_blockwise": ("e4m3", "blockwise"),
    "mxfp8": ("e4m3", "mxfp8"),
}


def dtype_of(precision: str) -> str:
    """Return the type of the factors of products: 8-bit ones are rounded copies of bf16."""
    return "bf16" if precision in FP8_RECIPES else precision


def weights_dtype(engine: str, precision: str) -> str:
    """Return the type of the weights in a model's memory and in its checkpoints.

    On DeepSpeed they are fp32 in bf16, too, as in plainLM: torch's autocast rounds them before each
    product. Imports, which are of no engine, have the type of their precision.
    """
    return "fp32" if engine == "deepspeed" else dtype_of(precision)
