"""The one table of architectures: the parts of a decoder block and their order.

Every block here is attention and then an MLP, each with linears that read the same input, something
in between, and one linear that writes to the residual stream. What differs is where the norms are
and whether both read the same residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from base.errors import UserError
from ckpt_tools.hf.measurable import MEASURABLE, attends_in_windows

LAYERS = "layers"  # of the decoder
# Where the linears of a block read, in the order in which they compute.
SITES = ("attention_in", "attention_out", "mlp_in", "mlp_out")

if TYPE_CHECKING:  # it brings torch, which takes seconds
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Family:
    """Names of an architecture's parts as transformers has them.

    Attributes:
        norms: "before" a part reads the residual stream, or "after" it and before it is added.
        centers: whether the norms subtract the mean, as LayerNorm does.
        decoder, embedding, final_norm, head: of the model.
        attention, attention_norm, reading, writing: the attention of a block and its linears.
        mlp, mlp_norm, mlp_reading, mlp_writing: the MLP of a block and its linears.
    """

    norms: Literal["before", "after"] = "before"
    centers: bool = False
    decoder: str = "model"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    attention_norm: str = "input_layernorm"
    reading: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    writing: str = "o_proj"
    mlp: str = "mlp"
    mlp_norm: str = "post_attention_layernorm"
    mlp_reading: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_writing: str = "down_proj"


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "smollm3": Family(),
    "olmo": Family(centers=True),
    "olmo2": Family(
        norms="after",
        attention_norm="post_attention_layernorm",
        mlp_norm="post_feedforward_layernorm",
    ),
    "apertus": Family(
        attention_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        mlp_reading=("up_proj",),
    ),
    "gpt_neox": Family(
        centers=True,
        decoder="gpt_neox",
        embedding="embed_in",
        final_norm="final_layer_norm",
        attention="attention",
        reading=("query_key_value",),
        writing="dense",
        mlp_reading=("dense_h_to_4h",),
        mlp_writing="dense_4h_to_h",
    ),
}

ARCHITECTURES = tuple(MEASURABLE.values())


def family_of(config: PretrainedConfig) -> Family:
    """Return the row of a model.

    UserError if the model has none, or attends in windows.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserError(
            f"architecture {config.model_type} is not known; give one of {', '.join(FAMILIES)}"
        )
    if attends_in_windows(config):
        raise UserError(
            f"{config.model_type} with sliding windows is not supported; give a model with full"
            " attention"
        )
    return family
