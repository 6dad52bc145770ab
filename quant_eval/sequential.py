"""The walk over the decoder: every linear is quantized on the inputs that the quantized model before it produces.

Shapes: N calibration sequences, L tokens of a sequence, B sequences of a batch, D hidden features, I input features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quant_eval.gptq import gptq, relative_output_error
from quant_eval.grid import round_to_nearest
from quant_eval.specs import QuantSpec
from train.command import Progress, UserError


@dataclass(frozen=True)
class LinearError:
    """A quantized linear: its name in the model, and tr(dW H dW^T) / tr(W H W^T) with the H it was quantized on."""

    name: str
    relative_output_error: float


def decoder_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linears of the decoder blocks by name: all that is ever quantized."""
    named = model.named_modules()
    return {name: part for name, part in named if isinstance(part, nn.Linear) and name.startswith("model.layers.")}


def check_groups(model: PreTrainedModel, spec: QuantSpec) -> None:
    """UserError if the group size does not divide the input features of every linear."""
    for name, linear in decoder_linears(model).items():
        if spec.group_size is not None and linear.in_features % spec.group_size:
            raise UserError(
                f"spec {spec.name}: group size {spec.group_size} does not divide the {linear.in_features} input "
                f"features of {name}; choose a divisor, or perchannel"
            )


def input_hessian(inputs: Sequence[Tensor], name: str) -> Tensor:
    """X^T X / tokens over all batches [B, L, I], products and sum in float64; [I, I]. UserError if not finite."""
    width = inputs[0].shape[-1]
    hessian_II = torch.zeros(width, width, dtype=torch.float64, device=inputs[0].device)
    for batch_BLI in inputs:
        tokens_TI = batch_BLI.reshape(-1, width).double()
        hessian_II.addmm_(tokens_TI.T, tokens_TI)
    if not bool(hessian_II.isfinite().all()):
        raise UserError(f"{name}: calibration inputs are not finite; check the checkpoint's weights")
    return hessian_II / sum(batch_BLI[..., 0].numel() for batch_BLI in inputs)


def quantize_shared_input(
    linears: dict[str, nn.Linear], inputs: Sequence[Tensor], spec: QuantSpec
) -> list[LinearError]:
    """Replaces the weights of linears that read the same input. One Hessian serves all: rows do not interact."""
    first = next(iter(linears))
    hessian_II = input_hessian(inputs, first)
    weight_OI = torch.cat([linear.weight for linear in linears.values()])
    rounded_OI = (
        gptq(weight_OI, hessian_II, spec, first) if spec.method == "gptq" else round_to_nearest(weight_OI, spec)
    ).to(weight_OI.dtype)
    errors = []
    for name, linear in linears.items():
        quantized_OI, rounded_OI = rounded_OI.split([linear.out_features, len(rounded_OI) - linear.out_features])
        errors.append(LinearError(name, relative_output_error(linear.weight, quantized_OI, hessian_II)))
        linear.weight.copy_(quantized_OI)
    return errors


def attention_outputs(attention: nn.Module, inputs: Sequence[Tensor], **context: Any) -> list[Tensor]:
    """What o_proj reads, batch by batch: the attention is run whole, and o_proj's input noted on the way."""
    noted: list[Tensor] = []
    handle = attention.o_proj.register_forward_pre_hook(lambda _, arguments: noted.append(arguments[0]))  # type: ignore[union-attr, operator]
    try:
        for batch_BLD in inputs:
            attention(hidden_states=batch_BLD, **context)
    finally:
        handle.remove()
    return noted


def quantize_layer(
    layer: Any, prefix: str, inputs: list[Tensor], spec: QuantSpec, **context: Any
) -> tuple[list[Tensor], list[LinearError]]:
    """Quantizes one OLMo2 block and returns the quantized block's outputs.

    The block is spelled out, h = x + norm(attention(x)), then h + norm(mlp(h)) (arXiv:2501.00656), so that each linear
    runs once and (q, k, v), o, (gate, up), down each read what the quantized linears before them made.
    """
    attention, mlp = layer.self_attn, layer.mlp

    def quantize(part: str, names: str, linear_inputs: Sequence[Tensor]) -> list[LinearError]:
        owner = getattr(layer, part)
        linears = {f"{prefix}.{part}.{name}": getattr(owner, name) for name in names.split()}
        return quantize_shared_input(linears, linear_inputs, spec)

    errors = quantize("self_attn", "q_proj k_proj v_proj", inputs)
    attended = attention_outputs(attention, inputs, **context)
    errors += quantize("self_attn", "o_proj", attended)
    middle = [x + layer.post_attention_layernorm(attention.o_proj(a)) for x, a in zip(inputs, attended, strict=True)]
    errors += quantize("mlp", "gate_proj up_proj", middle)
    gated = [mlp.act_fn(mlp.gate_proj(h)) * mlp.up_proj(h) for h in middle]
    errors += quantize("mlp", "down_proj", gated)
    outputs = [h + layer.post_feedforward_layernorm(mlp.down_proj(g)) for h, g in zip(middle, gated, strict=True)]
    return outputs, errors


@torch.no_grad()
def quantize_model(
    model: Any, spec: QuantSpec, calibration_NL: Tensor, batch_size: int, progress: Progress
) -> list[LinearError]:
    """Quantizes the decoder blocks in place, first to last, on unpadded sequences of equal length.

    The model must run causal attention without a mask (sdpa does): none is passed. Advances `progress` once a layer.
    """
    assert model.config._attn_implementation == "sdpa"
    check_groups(model, spec)
    decoder = model.model
    hidden = [decoder.embed_tokens(tokens_BL) for tokens_BL in calibration_NL.split(batch_size)]
    position_ids = torch.arange(calibration_NL.shape[1], device=calibration_NL.device)[None]
    context = {"position_embeddings": decoder.rotary_emb(hidden[0], position_ids=position_ids), "attention_mask": None}
    errors = []
    for index, layer in enumerate(decoder.layers):
        hidden, layer_errors = quantize_layer(layer, f"model.layers.{index}", hidden, spec, **context)
        errors += layer_errors
        progress.advance()
    assert {error.name for error in errors} == set(decoder_linears(model)), "a linear was left out of the walk"
    return errors
