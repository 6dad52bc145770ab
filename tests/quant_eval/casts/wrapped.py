"""compressed-tensors' own quantized linear, with min-max scales: a witness.

Shapes: O outputs, I inputs.
"""

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import nn


def wrapped_linear(
    weight_OI: torch.Tensor,
    weights: QuantizationArgs | None,
    activations: QuantizationArgs | None,
    observed: torch.Tensor | None = None,
) -> nn.Module:
    """A model of one linear whose forward rounds weight and inputs, of the weight's dtype."""
    num_outputs, num_inputs = weight_OI.shape
    model = nn.Sequential(nn.Linear(num_inputs, num_outputs, bias=False)).to(weight_OI.dtype)
    linear = model[0]
    linear.weight.data = weight_OI
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}))
    if hasattr(linear, "weight_global_scale"):
        linear.weight_global_scale.data = generate_gparam(*weight_OI.aminmax())
    if hasattr(linear, "weight_scale"):
        assert weights is not None
        grouped = {"tensor": weight_OI.reshape(1, -1), "channel": weight_OI[:, None]}.get(
            str(weights.strategy), weight_OI.unflatten(1, (-1, weights.group_size or num_inputs))
        )
        global_scale = getattr(linear, "weight_global_scale", None)
        scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), weights, global_scale)
        assert scale.shape == linear.weight_scale.shape
        linear.weight_scale.data = scale
    if hasattr(linear, "input_global_scale"):
        assert observed is not None
        linear.input_global_scale.data = generate_gparam(*observed.aminmax())
    if hasattr(linear, "input_scale"):
        assert observed is not None
        linear.input_scale.data = calculate_qparams(*observed.aminmax(), activations)[0]
    return model


@torch.no_grad()
def wrapped_cast(
    x: torch.Tensor, args: QuantizationArgs, observed: torch.Tensor | None = None
) -> torch.Tensor:
    """Inputs [..., I] as that linear multiplies them: its weight is the identity."""
    identity_II = torch.eye(x.shape[-1], dtype=x.dtype)
    cast: torch.Tensor = wrapped_linear(identity_II, None, args, observed)(x)
    return cast
