"""The one table of model families: a family is a file here, with its row.

The row says what training, export, import, quantization and curvature need to know of it; which
other modules read: `family.py` has the fields. Needs neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from base.errors import UserError
from train.model.families.apertus import APERTUS
from train.model.families.family import Family, Trainable
from train.model.families.gpt_neox import GPT_NEOX
from train.model.families.llama import LLAMA
from train.model.families.mistral import MISTRAL
from train.model.families.olmo import OLMO
from train.model.families.olmo2 import OLMO2
from train.model.families.qwen import QWEN2, QWEN3
from train.model.families.smollm3 import SMOLLM3
from train.model.families.unmeasured import UNMEASURED

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PretrainedConfig

FAMILIES = {  # by the model_type of config.json
    "olmo2": OLMO2,
    "olmo": OLMO,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "smollm3": SMOLLM3,
    "apertus": APERTUS,
    "gpt_neox": GPT_NEOX,
}
TRAINED: dict[str, Trainable] = {
    name: family.training for name, family in FAMILIES.items() if family.training
}
ARCHITECTURES = tuple(family.architecture for family in FAMILIES.values())
TRAINED_ARCHITECTURES = tuple(FAMILIES[name].architecture for name in TRAINED)
TRAJECTORIES = (
    *(trajectory for family in FAMILIES.values() for trajectory in family.released),
    *UNMEASURED,
)

LAYERS = "layers"  # of the decoder
# Where the linears of a block read, in the order in which they compute.
SITES = ("attention_in", "attention_out", "mlp_in", "mlp_out")


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


def attends_in_windows(config: PretrainedConfig) -> bool:
    """Return whether a layer of a model does not attend to all tokens before."""
    kinds = getattr(config, "layer_types", None)  # without it one window is for all layers
    if kinds:
        return set(kinds) != {"full_attention"}
    return bool(getattr(config, "sliding_window", None))
