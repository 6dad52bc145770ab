"""Checkpoints in compressed-tensors' format, which llm-compressor writes and vLLM loads.

Codes, packing and config.json are compressed-tensors' own. Scales are kept as they were measured,
in fp32 where the format has no type of its own. transformers converts them to the dtype it loads a
model in: in fp32 it computes with the measured weights, in bf16, as vLLM does for integers, with
rounded scales. MX formats and NVFP4 are exact in bf16; transformers unpacks them to nothing else.

vLLM's loader (vllm/model_executor/layers/quantization/compressed_tensors) is followed in:
- names: weight_packed, weight_scale, weight_zero_point, weight_shape, weight_global_scale,
  input_scale, input_global_scale of linears as config.json's model names them, before vLLM fuses
  them; k_scale and v_scale of attention modules; `ignore` names the output head.
- formats by scheme: pack-quantized for integers without activations, and with int4 or int8 ones of
  a token; int-quantized for W8A8; float-quantized for FP8; mxfp8-quantized, mxfp4-pack-quantized,
  nvfp4-pack-quantized. `format` is that of the group too. Zero points only where asymmetric.
- linears that it fuses (q, k, v; gate, up) have one global scale, and one scale of a tensor: theirs
  are fitted together (`rounding.grid`, `casts.activations`).
- groups are neighbouring inputs (actorder "group" is gone from compressed-tensors 0.19).
- an FP8 cache has one symmetric scale per tensor. Transforms: see `hadamard`.
Its kernels take 4 and 8 bits, groups of 32, 64 and 128 or a row, everywhere; the other widths, MX
formats and W4A4 in recent versions only.

Shapes: O output features, I input features, G groups of a row.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from base.errors import UserError
from ckpt_tools.formats.weights import Described, Weights, read_whole
from quant_eval.casts.activations import cast_args
from quant_eval.casts.attention import CacheCast, ScaledCast, attach
from quant_eval.casts.linear import CastLinear
from quant_eval.group import Rounded
from quant_eval.model.streamed import Block
from quant_eval.quantizer import COMPRESSED, GridSpec, QuantSpec
from quant_eval.quantizers import QUANTIZERS
from quant_eval.rounding.grid import PRESETS, local_scales
from quant_eval.saved.hadamard import INPUT, OUTPUT, HadamardTransforms, is_stored_matrix
from quant_eval.transforms.steps import Transform

if TYPE_CHECKING:  # they take seconds to import
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from transformers import PretrainedConfig

TRANSFORMS = "transform_config"  # key in `quantization_config`
GROUP = "group_0"
WORD_BITS = 32
FLOATS = {  # compressed-tensors' names of the formats of weights
    "fp8": "float-quantized",
    "mxfp8": "mxfp8-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "nvfp4": "nvfp4-pack-quantized",
}
SMALL_INTEGERS = ("ternary", "binary")  # -1, 0 and 1 are integers of two bits


class CompressedFormat:
    """One checkpoint in compressed-tensors' format.

    Args of the constructor:
        scheme: of the linears; None: their weights stay as they are.
        has_cache_scales: whether the KV cache is FP8.
        ignored: linears that are not quantized, by module name.
        transforms: of the linears.
    """

    scales = "weight_scale"  # last name of the tensor that only packed linears have

    def __init__(
        self,
        scheme: "QuantizationScheme | None",
        has_cache_scales: bool,
        ignored: list[str],
        transforms: HadamardTransforms,
    ) -> None:
        self._scheme, self._has_cache_scales = scheme, has_cache_scales
        self._ignored, self._transforms = ignored, transforms

    @staticmethod
    def of_spec(spec: QuantSpec, head: str, config: "PretrainedConfig") -> "CompressedFormat":
        """Return the format of a spec, for a model of that configuration and output head.

        UserError if the format cannot hold the spec.
        """
        transforms = HadamardTransforms.of_spec(spec, config)
        check_spec(spec)
        return CompressedFormat(scheme_of(spec), spec.kv is not None, [head], transforms)

    @staticmethod
    def read(settings: dict[str, Any]) -> "CompressedFormat":
        """Return the format of a saved checkpoint from its `quantization_config`."""
        from compressed_tensors.quantization import QuantizationConfig

        config = QuantizationConfig.model_validate(settings)
        scheme: Any = config.config_groups.get(GROUP)
        transforms = HadamardTransforms.read(settings.get(TRANSFORMS, {}))
        has_cache = config.kv_cache_scheme is not None
        return CompressedFormat(scheme, has_cache, config.ignore or [], transforms)

    @property
    def settings(self) -> dict[str, Any]:
        """The value of `quantization_config` in config.json."""
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationStatus,
        )

        cache = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
        config = QuantizationConfig(
            config_groups={GROUP: self._scheme} if self._scheme else {},
            format=str(self._scheme.format) if self._scheme else "dense",
            quantization_status=QuantizationStatus.COMPRESSED,
            kv_cache_scheme=cache if self._has_cache_scales else None,
            ignore=self._ignored,
        )
        transforms = self._transforms.config()
        rotations = {TRANSFORMS: transforms.model_dump(mode="json")} if transforms else {}
        settings: dict[str, Any] = config.model_dump(mode="json")
        return settings | rotations

    def check_linears(self, linears: Mapping[str, nn.Linear]) -> None:
        """Refuse linears whose codes do not fill words of 32 bits, which vLLM needs.

        So are attentions with one linear for q, k and v whose cache is to be cast: readers look for
        one of keys.
        """
        self._transforms.check_linears(linears)
        if self._has_cache_scales and not any(name.endswith(".k_proj") for name in linears):
            raise UserError(
                "compressed-tensors casts no cache of an attention without k_proj; leave -kvfp8 out"
            )
        if self._scheme is None or self._scheme.format != "pack-quantized":
            return
        assert self._scheme.weights is not None
        bits, is_symmetric = self._scheme.weights.num_bits, self._scheme.weights.symmetric
        for name, linear in linears.items():
            # zero points are packed along the outputs
            outputs = 0 if is_symmetric else linear.out_features
            packed = (("inputs", linear.in_features), ("outputs", outputs))
            for what, count in packed:
                if count * bits % WORD_BITS:
                    raise UserError(
                        f"{name} has {count} {what}, whose {bits} bits fill no words of {WORD_BITS}"
                        " as loaders unpack them; give 8 bits, or measure without --save"
                    )

    def pack(self, linear: str, rounded: Rounded, inputs: Transform | None) -> dict[str, Tensor]:
        """Return the tensors of a linear by name.

        `rounded` is in the basis of its transforms.
        """
        assert self._scheme is not None
        parts = compress(rounded, self._scheme)
        # Unpacked again at once, so that no file can hold other weights than were measured.
        exact = torch.equal(decompress(parts, self._scheme), rounded.dense())
        assert exact, f"{linear}: the format does not give back what was measured"
        tensors = {f"{linear}.{key}": tensor for key, tensor in parts.items()}
        if inputs is not None and len(inputs.steps):
            tensors |= self._transforms.add(linear, rounded.codes_OI.shape[1], inputs)
        return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}

    def block_tensors(self, block: Block) -> dict[str, Tensor]:
        """Return a quantized block's fixed scales of activations and cache by name, fp32 [1]."""
        tensors: dict[str, Tensor] = {}
        for name, linear in _linears(block).items():
            if isinstance(linear, CastLinear) and linear.inputs.cast.needs_range:
                cast: Any = linear.inputs.cast
                key = "input_scale" if cast.is_static else "input_global_scale"
                tensors[f"{name}.{key}"] = cast.scale(linear.weight.dtype)
        if self._has_cache_scales:
            cache: Any = block.attention.cache_cast
            owner = f"{block.prefix}.{block.family.attention}"
            tensors |= {f"{owner}.{key}": scale for key, scale in cache.scales().items()}
        return {name: scale.float().cpu().view(1).clone() for name, scale in tensors.items()}

    def is_weight(self, name: str) -> bool:
        """Return whether a tensor of another module than packed linears is one of the model's."""
        last = name.rpartition(".")[2]
        return last not in ("k_scale", "v_scale") and not is_stored_matrix(name)

    def weight_shape(self, parts: Mapping[str, Described]) -> tuple[int, int]:
        """Return the shape [O, I] of the weight that tensors of a linear hold."""
        assert self._scheme is not None
        assert self._scheme.weights is not None
        if "weight" in parts:
            num_outputs, num_inputs = parts["weight"].shape
            return num_outputs, num_inputs
        packed = parts["weight_packed"]
        return packed.shape[0], packed.row_bytes * 8 // self._scheme.weights.num_bits

    def dense(self, linear: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the weight as it was measured, fp32 [O, I].

        Where activations are cast it is in the basis of the transforms, otherwise the model's.
        """
        assert self._scheme is not None
        weight_OI = decompress(parts, self._scheme)
        num_outputs, num_inputs = weight_OI.shape
        inputs = self._transforms.of(INPUT, linear, num_inputs)
        outputs = self._transforms.of(OUTPUT, linear, num_outputs)
        if inputs is None or self._scheme.input_activations:
            return weight_OI
        rotated_OI = weight_OI.double()  # as in the measurement
        if outputs is not None:
            rotated_OI = outputs.restored(rotated_OI.T).T
        return inputs.restored(rotated_OI).float()

    def restore(self, block: Block, tensors: Weights) -> None:
        """Let a block that holds `dense` weights cast its activations and cache as the file says.

        Linears cast as compressed-tensors' own modules do.
        """
        for name, linear in _linears(block).items():
            if self._scheme and self._scheme.input_activations:
                scales = {
                    key: read_whole(tensors, f"{name}.{key}")
                    for key in ("input_scale", "input_global_scale")
                    if f"{name}.{key}" in tensors.tensors
                }
                inputs = self._transforms.of(INPUT, name, linear.in_features)
                outputs = self._transforms.of(OUTPUT, name, linear.out_features)
                cast_inputs(linear, self._scheme.input_activations, scales)
                transform(linear, inputs, outputs)
        if self._has_cache_scales:
            owner = f"{block.prefix}.{block.family.attention}"
            keys, values = (read_whole(tensors, f"{owner}.{key}_scale") for key in "kv")
            cast_cache(block, keys, values)


def compress(rounded: Rounded, scheme: "QuantizationScheme") -> dict[str, Tensor]:
    """Return the tensors of a linear by their last names, from its codes and scales."""
    from compressed_tensors.compressors import BaseCompressor

    args = scheme.weights
    assert args is not None
    num_inputs = len(rounded.groups_I)
    # Nothing in the format says which group an input is in: loaders count them off.
    natural_I = torch.arange(num_inputs) // (args.group_size or num_inputs)
    assert torch.equal(rounded.groups_I.long().cpu(), natural_I), "groups are not of neighbours"
    state = {"weight": rounded.dense(), "weight_scale": rounded.scales_OG}
    if rounded.global_scale is not None:
        global_scale = rounded.global_scale.to(rounded.scales_OG.device)
        local_OG = local_scales(rounded.scales_OG, global_scale)
        state |= {"weight_scale": local_OG, "weight_global_scale": global_scale}
    if args.strategy == "tensor":
        assert bool((rounded.scales_OG == rounded.scales_OG[0, 0]).all()), "more than one scale"
        state["weight_scale"] = rounded.scales_OG[0, :1]
    if not args.symmetric:
        middle = 2 ** (args.num_bits - 1)
        # Codes of compressed-tensors are signed: its 0 is the middle of ours.
        state["weight_zero_point"] = (rounded.zeros_OG.short() - middle).to(torch.int8)
    compressor = BaseCompressor.get_value_from_registry(str(scheme.format))
    compressed: dict[str, Tensor] = compressor.compress(state, scheme)
    return compressed


def decompress(parts: Mapping[str, Tensor], scheme: "QuantizationScheme") -> Tensor:
    """Return the weight that `compress` was given, fp32 [O, I]."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    if "weight_global_scale" in parts:  # whose compressor rounds the weight to bf16
        num_outputs, num_bytes = parts["weight_packed"].shape
        numbers_OI = unpack_fp4_from_uint8(
            parts["weight_packed"], num_outputs, 2 * num_bytes, torch.float32
        )
        scales_OG, global_scale = parts["weight_scale"].float(), parts["weight_global_scale"]
        weight_OI: Tensor = dequantize(
            numbers_OI, scales_OG, args=scheme.weights, global_scale=global_scale
        )
        return weight_OI
    compressor = BaseCompressor.get_value_from_registry(str(scheme.format))
    return compressor.decompress(dict(parts), scheme)["weight"].float()  # type: ignore[no-any-return]


def _linears(block: Block) -> dict[str, nn.Linear]:
    return {name: linear for group in block.linears() for name, linear in group.items()}


def check_spec(spec: QuantSpec) -> None:
    """Refuse a spec that the format cannot hold."""
    instead = "measure it without --save" if spec.casts else "write its weights with --dense"
    kept = [each.method for each in QUANTIZERS if COMPRESSED in each.saved and each.rounds_weights]
    problem = None
    if COMPRESSED not in spec.saved:
        problem = (
            f"codes of {spec.method} are not kept; give one of {' or '.join(kept)}, or {instead}"
        )
    elif not spec.rounds_weights and spec.activations:
        problem = "the format casts activations of quantized linears alone; give w8a8 or fp8"
    elif spec.kv and spec.kv != "fp8":
        problem = "checkpoints hold scales of an FP8 cache alone; give kvfp8"
    elif isinstance(spec, GridSpec):
        problem = _problem_of_grids(spec)
    if problem:
        raise UserError(f"spec {spec.name} cannot be saved: {problem}")


def _problem_of_grids(spec: GridSpec) -> str | None:
    if "fp8e5m2" in (spec.format, spec.activations):
        return "compressed-tensors has no E5M2; give fp8"
    if spec.group_size and not spec.groups_are_ranges:
        return (
            "compressed-tensors holds groups of neighbouring inputs; give actorder-static,"
            " groupaware or perchannel, or -s16 for GPTQ's format"
        )
    if spec.activations and spec.format == "int" and not spec.symmetric:
        return "engines take activations with symmetric weights alone; leave -asym out"
    return None


def scheme_of(spec: QuantSpec) -> "QuantizationScheme | None":
    """Return the scheme that quantizes the linears, None if they are not quantized."""
    from compressed_tensors.quantization import QuantizationScheme

    if not isinstance(spec, GridSpec):
        return None
    inputs = cast_args(spec.activations, spec.static_activations) if spec.activations else None
    is_whole = spec.format == "int" and spec.bits == 8 and spec.activations == "int8"
    return QuantizationScheme(
        targets=["Linear"],
        weights=_weight_args(spec),
        input_activations=inputs,
        format=FLOATS.get(spec.format, "int-quantized" if is_whole else "pack-quantized"),
    )


def _weight_args(spec: GridSpec) -> "QuantizationArgs":
    from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

    if spec.format in FLOATS:
        is_static = spec.format == "fp8" and spec.static_activations
        preset = "FP8" if is_static else PRESETS[spec.format]
        return preset_name_to_scheme(preset, ["Linear"]).weights
    return QuantizationArgs(
        num_bits=2 if spec.format in SMALL_INTEGERS else spec.bits,
        symmetric=spec.format in SMALL_INTEGERS or spec.symmetric,
        strategy="group" if spec.group_size else "channel",
        group_size=spec.group_size,
    )


def cast_inputs(linear: nn.Linear, args: "QuantizationArgs", scales: dict[str, Tensor]) -> None:
    """Let a linear cast its inputs, as compressed-tensors does it."""
    from compressed_tensors.quantization import (
        QuantizationScheme,
        QuantizationStatus,
        initialize_module_for_quantization,
    )

    scheme: Any = QuantizationScheme(targets=["Linear"], input_activations=args)
    initialize_module_for_quantization(linear, scheme, force_zero_point=False)
    linear.quantization_status = QuantizationStatus.DECOMPRESSED
    for key, scale in scales.items():
        linear.get_parameter(key).data.copy_(scale)


def transform(linear: nn.Linear, inputs: Transform | None, outputs: Transform | None) -> None:
    """Let a linear transform its inputs, and its outputs back to the model's basis."""
    device = linear.weight.device
    if inputs is not None:
        forth = inputs.to(device)
        linear.register_forward_pre_hook(lambda _, arguments: (forth.inputs(arguments[0]),))
    if outputs is not None:
        back = outputs.to(device)
        linear.register_forward_hook(lambda _, arguments, computed: back.restored(computed))  # noqa: ARG005


def cast_cache(block: Block, keys: Tensor, values: Tensor) -> None:
    """Let a block's attention read keys and values through FP8 with these scales."""
    # Any range will do: both scales are replaced by those of the file.
    key_cast, value_cast = (ScaledCast(torch.ones(1), owner) for owner in ("keys", "values"))
    key_cast.scale, value_cast.scale = keys, values
    attach(block, CacheCast(key_cast, value_cast))
