"""The linears whose input scales the layer before them can absorb (AWQ), by architecture.

A fold multiplies the input columns of the balanced linears by s and divides what feeds them, the
smoothed layer's rows (weight and bias), by s. It is exact where nothing but a product with a
constant or with another activation lies between the two, and nothing else reads the smoothed
layer's output. Nothing is concluded from names: `check_folds` tries it.

Shapes: O output features, I input features, B sequences, L tokens, V tokens of a vocabulary.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from base.errors import UserError

# Of the largest logit. Two blocks in float64 with RMSNorm and softmax in fp32 stay below 1e-6.
TOLERANCE = 1e-5
SCALING_ROUNDINGS = 2  # in units of eps: a weight may be scaled twice, by its columns and its rows
WITNESS_BLOCKS = 2
WITNESS_VOCABULARY = 256
WITNESS_TOKENS = (2, 16)  # B, L


@dataclass(frozen=True)
class Fold:
    """Scales of the input columns of `balance`, divided from the rows of `smooth`, by name."""

    smooth: str
    balance: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.smooth} -> {', '.join(self.balance)}"


@dataclass(frozen=True)
class Mappings:
    """The scaled linears of every block of a model.

    Attributes:
        blocks: name of the list of decoder blocks.
        folds: every linear is balanced by one at most.
        unscaled: every other linear, and why nothing can absorb its scales.
    """

    blocks: str
    folds: tuple[Fold, ...]
    unscaled: dict[str, str]


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
# The attention's output is linear in the values.
_VALUES = Fold("self_attn.v_proj", ("self_attn.o_proj",))
_GATED = Fold("mlp.up_proj", ("mlp.down_proj",))  # down_proj reads act(gate) * up
_LLAMA = Mappings(
    "model.layers",
    (Fold("input_layernorm", _QKV), _VALUES, Fold("post_attention_layernorm", _GATE_UP), _GATED),
    {},
)

_ARCHITECTURES: dict[str, Mappings] = {  # by model_type
    "llama": _LLAMA,
    "smollm3": _LLAMA,
    "olmo": Mappings(
        "model.layers",
        (_VALUES, _GATED),
        dict.fromkeys(_QKV + _GATE_UP, "its layer norm has no parameters"),
    ),
    "olmo2": Mappings(
        "model.layers",
        (_VALUES, _GATED),
        dict.fromkeys(_QKV + _GATE_UP, "it reads the residual stream, no norm"),
    ),
    "gpt_neox": Mappings(
        "gpt_neox.layers",
        (
            Fold("input_layernorm", ("attention.query_key_value",)),
            Fold("post_attention_layernorm", ("mlp.dense_h_to_4h",)),
        ),
        {
            "attention.dense": "the values' rows are among those of queries and keys",
            "mlp.dense_4h_to_h": "it reads GELU(dense_h_to_4h), which does not scale",
        },
    ),
    "apertus": Mappings(
        "model.layers",
        (
            Fold("attention_layernorm", _QKV),
            _VALUES,
            Fold("feedforward_layernorm", ("mlp.up_proj",)),
        ),
        {"mlp.down_proj": "it reads xIELU(up_proj), which does not scale"},
    ),
}
ARCHITECTURES = tuple(  # as config.json names them
    f"{name}ForCausalLM" for name in ("Llama", "SmolLM3", "Olmo", "Olmo2", "GPTNeoX", "Apertus")
)


def mappings_for(config: Any) -> Mappings:
    """Return the folds that are exact for a transformers configuration, and why others are not.

    Raises:
        UserError: there is no table for the architecture.
    """
    values: dict[str, Any] = config.to_dict()
    if config.model_type not in _ARCHITECTURES:
        raise UserError(
            f"AWQ has no mappings for {config.model_type}, only for"
            f" {', '.join(sorted(_ARCHITECTURES))}; use gptq or rtn, or add its folds to"
            " quant_eval/libraries/awq_mappings.py"
        )
    table = _ARCHITECTURES[config.model_type]
    reason = None
    heads, value_heads = values["num_attention_heads"], values.get("num_key_value_heads")
    if value_heads not in (None, heads):
        reason = (
            f"{heads} query heads share the values of {value_heads}: each value's row would need"
            " several scales"
        )
    elif values.get("clip_qkv") is not None:
        reason = f"the values are clipped at {values['clip_qkv']} (clip_qkv)"
    if _VALUES not in table.folds or reason is None:
        return table
    folds = tuple(fold for fold in table.folds if fold != _VALUES)
    return Mappings(table.blocks, folds, table.unscaled | {"self_attn.o_proj": reason})


def mapped_linears(model: PreTrainedModel, mappings: Mappings) -> list[str]:
    """Names of all linears of the decoder blocks, in order.

    Raises:
        UserError: the mappings do not say of each linear once whether and how its inputs are
            scaled.
    """
    told = sorted(
        [linear for fold in mappings.folds for linear in fold.balance] + list(mappings.unscaled)
    )
    names = []
    for index, block in enumerate(_blocks(model, mappings)):
        found = [name for name, part in block.named_modules() if isinstance(part, nn.Linear)]
        if sorted(found) != told:
            differing = sorted(set(found) ^ set(told)) or told
            raise UserError(
                f"AWQ's mappings for {model.config.model_type} do not fit"
                f" {mappings.blocks}.{index}: {', '.join(differing)}; correct"
                " quant_eval/libraries/awq_mappings.py"
            )
        names += [f"{mappings.blocks}.{index}.{name}" for name in found]
    return names


def _blocks(model: PreTrainedModel, mappings: Mappings) -> list[nn.Module]:
    return list(model.get_submodule(mappings.blocks).children())


@torch.no_grad()
def apply_fold(block: nn.Module, fold: Fold, scales_I: Tensor) -> None:
    """Multiply the balanced linears' input columns by `scales_I`, divide the smoothed layer.

    Raises:
        UserError: the smoothed layer has no parameters, or not one row for each scale.
    """
    absorbing = dict(block.get_submodule(fold.smooth).named_parameters())
    if not absorbing:
        raise UserError(
            f"AWQ mapping {fold}: {fold.smooth} has no parameters to absorb scales; remove the"
            " mapping"
        )
    for parameter in absorbing.values():
        if len(parameter) != len(scales_I):
            raise UserError(
                f"AWQ mapping {fold}: {fold.smooth} has {len(parameter)} rows for {len(scales_I)}"
                f" inputs of {fold.balance[0]}; remove the mapping"
            )
    for name in fold.balance:
        weight_OI = block.get_submodule(name).get_parameter("weight")
        weight_OI.mul_(scales_I)
    for parameter in absorbing.values():
        parameter.div_(scales_I.reshape(-1, *[1] * (parameter.ndim - 1)))


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put back every parameter, bit for bit, when the body ends."""
    saved = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(saved[name])


@torch.no_grad()
def check_folds(model: PreTrainedModel, mappings: Mappings, seed: int) -> None:
    """Apply each fold with random factors of 1/8 to 8; the logits must not move.

    The model is left as it was, bit for bit. Factors and tokens are drawn from `seed`.

    Raises:
        UserError: a fold moves a logit by more than `TOLERANCE` of the largest or cannot be
            applied, or logits are not finite to begin with.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn_BL = torch.randint(model.config.vocab_size, WITNESS_TOKENS, generator=generator)
    tokens_BL = drawn_BL.to(model.device)
    before_BLV = model(input_ids=tokens_BL, use_cache=False).logits
    if not bool(before_BLV.isfinite().all()):
        raise UserError(
            "AWQ: the unquantized model's logits are not finite; check the checkpoint's weights"
        )
    for fold in mappings.folds:
        with _restored(model):
            for block in _blocks(model, mappings):
                weight_OI = block.get_submodule(fold.balance[0]).get_parameter("weight")
                exponents_I = (
                    torch.rand(weight_OI.shape[1], generator=generator, dtype=torch.float64) * 6 - 3
                )
                apply_fold(block, fold, exponents_I.exp2().to(weight_OI))
            after_BLV = model(input_ids=tokens_BL, use_cache=False).logits
        moved = float((after_BLV - before_BLV).abs().max() / before_BLV.abs().max())
        if not moved <= TOLERANCE:  # nor NaN
            raise UserError(
                f"AWQ mapping {fold}: folding scales moves the logits of the unquantized"
                f" {model.config.model_type} by {moved:.1e} of the largest, more than"
                f" {TOLERANCE:g}; remove it from the mappings"
            )


@torch.no_grad()
def check_scaled(
    scaled: PreTrainedModel,
    original: PreTrainedModel,
    mappings: Mappings,
    scales: dict[str, Tensor],
) -> None:
    """Check that every parameter is the original's with the folds applied, up to rounding.

    Args:
        scaled: what is tried; its dtype is the original's.
        original: the model before.
        mappings: of both.
        scales: of each fold of each block, by the full name of the smoothed layer.

    Raises:
        UserError: a parameter is anything else.
    """
    held = dict(scaled.named_parameters())
    expected = dict(original.named_parameters())
    touched = set()
    for index, block in enumerate(_blocks(original, mappings)):
        prefix = f"{mappings.blocks}.{index}."
        exact = copy.deepcopy(block).double()
        for fold in mappings.folds:
            apply_fold(exact, fold, scales[prefix + fold.smooth].double())
            touched |= {f"{prefix}{linear}.weight" for linear in fold.balance}
            touched |= {
                f"{prefix}{fold.smooth}.{name}"
                for name, _ in block.get_submodule(fold.smooth).named_parameters()
            }
        expected |= {prefix + name: parameter for name, parameter in exact.named_parameters()}
    for name, parameter in expected.items():
        eps = torch.finfo(held[name].dtype).eps if name in touched else 0.0
        if not bool(
            ((held[name] - parameter).abs() <= SCALING_ROUNDINGS * eps * parameter.abs()).all()
        ):
            raise UserError(f"{name} is not the original times its AWQ scales; use another method")


@torch.no_grad()
def witness(model: PreTrainedModel) -> PreTrainedModel:
    """Return the first blocks of a model in float64, with the first rows of its vocabulary.

    Whether a fold is exact depends on the configuration and on how activations are clipped, not on
    the depth: two real blocks tell, in gigabytes and seconds where a 7B model in float64 would take
    56 GB. float64, because bf16 cannot resolve the tolerance.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = min(WITNESS_BLOCKS, config.num_hidden_layers)
    config.vocab_size = min(WITNESS_VOCABULARY, config.vocab_size)
    config.pad_token_id = None  # may lie outside of these rows
    small: PreTrainedModel = (
        AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    )
    held = model.state_dict()
    small.load_state_dict(
        {
            name: held[name][: len(tensor)] if tensor.ndim else held[name]
            for name, tensor in small.state_dict().items()
        }
    )
    return small
