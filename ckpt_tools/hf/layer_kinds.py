"""Inputs of each kind of layer besides the residual stream: rotary tables, and a mask of windows.

Kinds are transformers': of full attention, and of sliding windows. Layers of one kind share both.

Shapes: B sequences, S positions of a sequence, E features of a head.
"""

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig
from transformers.masking_utils import create_sliding_window_causal_mask

from train.model.families import SLIDING, family_of, layer_kinds

Tables = tuple[Tensor, Tensor]  # cosines and sines, each [B, S, E]


def rotary_tables(
    rotary: Any, config: PretrainedConfig, example: Tensor, positions_BS: Tensor
) -> dict[str, Tables]:
    """Return the tables of each kind of layer.

    Args:
        rotary: the decoder's module.
        config: of the model.
        example: a tensor of the device and dtype that the tables get.
        positions_BS: of the tokens.
    """
    kinds = dict.fromkeys(layer_kinds(config))
    if family_of(config).windows == "rotary_by_kind":
        return {kind: rotary(example, positions_BS, kind) for kind in kinds}
    # the same tables for all
    return dict.fromkeys(kinds, rotary(example, positions_BS))


def attention_masks(config: PretrainedConfig, example_BSx: Tensor) -> dict[str, Tensor | None]:
    """Return the mask of each kind of layer for sdpa: True where a query sees a key.

    None: sdpa needs none, as queries see all keys before. That is so of windows as well, where
    sequences are shorter.

    Args:
        config: of a model that attends by sdpa.
        example_BSx: of which the first two sizes, the dtype and the device are read.
    """
    masks = dict[str, Tensor | None].fromkeys(layer_kinds(config))
    if SLIDING in masks:
        mask: Any = create_sliding_window_causal_mask(config, example_BSx, None, None)
        masks[SLIDING] = mask  # [B, 1, S, S]
    return masks
