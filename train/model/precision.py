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
    """Return the type of weights and activations: 8-bit products round copies of bf16 weights."""
    return "bf16" if precision in FP8_RECIPES else precision
