"""The linears whose input scales the layer before them can absorb (AWQ), by family.

A fold multiplies the input columns of the balanced linears by s and divides what feeds them, the
smoothed layer's rows (weight and bias), by s. It is exact where nothing but a product with a
constant or with another activation is between the two, and nothing else reads the smoothed
layer's output. Nothing is concluded from names: `check_folds` tries it.

Shapes: O output features, I input features, B sequences, L tokens, V tokens of a vocabulary.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from base.errors import UserError
from train.model.families import LAYERS, family_of

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


def mappings_for(model: PreTrainedModel) -> Mappings:
    """Return the folds that are exact for a model, and why others are not."""
    config, family = model.config, family_of(model.config)
    blocks = f"{family.decoder}.{LAYERS}"
    first = model.get_submodule(f"{blocks}.0")
    parts = (
        (family.attention_norm, family.attention, family.reading, family.writing),
        (family.mlp_norm, family.mlp, family.mlp_reading, family.mlp_writing),
    )
    folds, unscaled = list[Fold](), dict[str, str]()
    for norm, part, reading, writing in parts:
        linears = tuple(f"{part}.{name}" for name in reading)
        if family.norms == "after":
            unscaled |= dict.fromkeys(linears, "it reads the residual stream, no norm")
        elif not list(first.get_submodule(norm).parameters()):
            unscaled |= dict.fromkeys(linears, "its layer norm has no parameters")
        else:
            folds.append(Fold(norm, linears))
        problem = _unscaled_values(config) if part == family.attention else _ungated(config)
        if problem:
            unscaled[f"{part}.{writing}"] = problem
        else:  # values, or up_proj: what is written is linear in the last that is read
            folds.append(Fold(linears[-1], (f"{part}.{writing}",)))
    return Mappings(blocks, tuple(folds), unscaled)


def _unscaled_values(config: Any) -> str | None:
    """Return why the attention's last linear cannot take scales from the values."""
    heads, value_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if "v_proj" not in family_of(config).reading:
        return "the values' rows are among those of queries and keys"
    if value_heads not in (None, heads):
        return (
            f"{heads} query heads share the values of {value_heads}: each value's row would need"
            " several scales"
        )
    if getattr(config, "clip_qkv", None) is not None:
        return f"the values are clipped at {config.clip_qkv} (clip_qkv)"
    return None


def _ungated(config: Any) -> str | None:
    """Return why the MLP's last linear, unless it reads act(gate) * up, cannot take scales."""
    reading = family_of(config).mlp_reading
    if reading == ("gate_proj", "up_proj"):
        return None
    return f"it reads {config.hidden_act}({reading[0]}), which does not scale"


def _blocks(model: PreTrainedModel, mappings: Mappings) -> list[nn.Module]:
    return list(model.get_submodule(mappings.blocks).children())


@torch.no_grad()
def apply_fold(block: nn.Module, fold: Fold, scales_I: Tensor) -> None:
    """Multiply the balanced linears' input columns by `scales_I`, divide the smoothed layer.

    UserError if the smoothed layer does not have one row for each scale.
    """
    absorbing = dict(block.get_submodule(fold.smooth).named_parameters())
    if not absorbing or any(len(each) != len(scales_I) for each in absorbing.values()):
        raise UserError(
            f"AWQ mapping {fold}: {fold.smooth} has no row for each input of {fold.balance[0]};"
            " remove the mapping"
        )
    for name in fold.balance:
        weight_OI = block.get_submodule(name).get_parameter("weight")
        weight_OI.mul_(scales_I)
    for parameter in absorbing.values():
        parameter.div_(scales_I.reshape(-1, *[1] * (parameter.ndim - 1)))


@torch.no_grad()
def check_folds(model: PreTrainedModel, mappings: Mappings, seed: int) -> None:
    """Apply each fold to a copy with random factors of 1/8 to 8.

    The logits must not move.

    UserError if a fold moves one by more than `TOLERANCE` of the largest, or cannot be applied.
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
        folded = copy.deepcopy(model)
        for block in _blocks(folded, mappings):
            weight_OI = block.get_submodule(fold.balance[0]).get_parameter("weight")
            drawn_I = torch.rand(weight_OI.shape[1], generator=generator, dtype=torch.float64)
            apply_fold(block, fold, (drawn_I * 6 - 3).exp2().to(weight_OI))
        after_BLV = folded(input_ids=tokens_BL, use_cache=False).logits
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
    """Refuse a parameter that is not the original's with the folds applied, up to rounding.

    `scales` are those of each fold of each block, by the full name of the smoothed layer.
    """
    parameters = dict(scaled.named_parameters())
    expected = dict(original.named_parameters())
    touched = set()
    for index, block in enumerate(_blocks(original, mappings)):
        prefix = f"{mappings.blocks}.{index}."
        # In float64, so that what differs is the rounding of the library.
        exact = copy.deepcopy(block).double()
        for fold in mappings.folds:
            apply_fold(exact, fold, scales[prefix + fold.smooth].double())
            touched |= {f"{prefix}{linear}.weight" for linear in fold.balance}
            smooth = block.get_submodule(fold.smooth)
            touched |= {f"{prefix}{fold.smooth}.{name}" for name, _ in smooth.named_parameters()}
        expected |= {prefix + name: parameter for name, parameter in exact.named_parameters()}
    for name, parameter in expected.items():
        # Scaled parameters may differ by rounding, all others not at all.
        eps = torch.finfo(parameters[name].dtype).eps if name in touched else 0.0
        allowed = SCALING_ROUNDINGS * eps * parameter.abs()
        if not bool(((parameters[name] - parameter).abs() <= allowed).all()):
            raise UserError(f"{name} is not the original times its AWQ scales; use another method")


@torch.no_grad()
def witness(model: PreTrainedModel) -> PreTrainedModel:
    """Return the first blocks of a model in float64, with the first rows of its vocabulary.

    Whether a fold is exact depends on the configuration and on how activations are clipped, not on
    the depth. Two real blocks are enough and take seconds, where a 7B model in float64 would take
    56 GB. float64, because bf16 cannot resolve the tolerance.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = min(WITNESS_BLOCKS, config.num_hidden_layers)
    config.vocab_size = min(WITNESS_VOCABULARY, config.vocab_size)
    config.pad_token_id = None  # may be outside of these rows
    small: PreTrainedModel = (
        AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    )
    tensors = model.state_dict()
    small.load_state_dict(
        {
            # Embedding and head have fewer rows here; all other shapes are the same.
            name: tensors[name][: len(tensor)] if tensor.ndim else tensors[name]
            for name, tensor in small.state_dict().items()
        }
    )
    return small
