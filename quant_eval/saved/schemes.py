"""The schemes of compressed-tensors for specs, and refusals of specs that have none."""

from typing import TYPE_CHECKING

from base.errors import UserError
from base.rounding.levels import PRESETS
from quant_eval.casts.activations import cast_args
from quant_eval.specs import QuantSpec

if TYPE_CHECKING:  # it takes seconds to import
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

FLOATS = {  # compressed-tensors' names of the formats of weights
    "fp8": "float-quantized",
    "mxfp8": "mxfp8-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}
SMALL_INTEGERS = ("ternary", "binary")  # -1, 0 and 1 are integers of two bits


def check_spec(spec: QuantSpec) -> None:
    """Refuse a spec that the format cannot hold."""
    instead = "measure it without --save" if spec.casts else "write its weights with --dense"
    problem = None
    if spec.method not in ("rtn", "gptq", "none"):
        problem = f"codes of {spec.method} are not kept; give one of rtn or gptq, or {instead}"
    elif spec.method == "none" and spec.activations:
        problem = "the format casts activations of quantized linears alone; give w8a8 or fp8"
    elif "fp8e5m2" in (spec.format, spec.activations):
        problem = "compressed-tensors has no E5M2; give fp8"
    elif spec.kv and spec.kv != "fp8":
        problem = "checkpoints hold scales of an FP8 cache alone; give kvfp8"
    elif spec.order == "actorder" and not spec.static_groups and spec.group_size:
        problem = (
            "compressed-tensors holds groups of neighbouring inputs; give actorder-static,"
            " groupaware or perchannel, or -s16 for GPTQ's format"
        )
    elif spec.activations and spec.format == "int" and not spec.symmetric:
        problem = "engines take activations with symmetric weights alone; leave -asym out"
    if problem:
        raise UserError(f"spec {spec.name} cannot be saved: {problem}")


def scheme_of(spec: QuantSpec) -> "QuantizationScheme | None":
    """Return the scheme that quantizes the linears, None if they are not quantized."""
    from compressed_tensors.quantization import QuantizationScheme

    if spec.method == "none":
        return None
    inputs = cast_args(spec.activations, spec.static_activations) if spec.activations else None
    is_whole = spec.format == "int" and spec.bits == 8 and spec.activations == "int8"
    return QuantizationScheme(
        targets=["Linear"],
        weights=_weight_args(spec),
        input_activations=inputs,
        format=FLOATS.get(spec.format, "int-quantized" if is_whole else "pack-quantized"),
    )


def _weight_args(spec: QuantSpec) -> "QuantizationArgs":
    from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

    if spec.format in FLOATS:
        is_static = spec.format == "fp8" and spec.static_activations
        preset = "FP8" if is_static else PRESETS[spec.format]
        return preset_name_to_scheme(preset, ["Linear"]).weights
    return QuantizationArgs(
        num_bits=2 if spec.format in SMALL_INTEGERS else spec.bits,
        symmetric=spec.format in SMALL_INTEGERS or bool(spec.symmetric),
        strategy="group" if spec.group_size else "channel",
        group_size=spec.group_size,
    )


def cache_args() -> "QuantizationArgs":
    """Return the arguments that quantize an FP8 cache."""
    from compressed_tensors.quantization import QuantizationArgs

    return QuantizationArgs(num_bits=8, type="float", strategy="tensor")
