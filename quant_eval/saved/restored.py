"""A block of a saved checkpoint that casts its activations and its cache as the files say."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quant_eval.casts.attention import CacheCast, RotatedCast, ScaledCast, attach
from quant_eval.model.streamed import Block
from quant_eval.transforms.steps import Transform

if TYPE_CHECKING:  # it takes seconds to import
    from compressed_tensors.quantization import QuantizationArgs


def cast_inputs(
    linear: nn.Linear,
    args: "QuantizationArgs",
    scales: dict[str, Tensor],
) -> None:
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
    casts = [ScaledCast(torch.ones(1), owner) for owner in ("keys", "values")]
    for cast, scale in zip(casts, (keys, values), strict=True):
        cast.scale = scale
    attach(block, CacheCast(*map(RotatedCast, casts)))
