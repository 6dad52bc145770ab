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
from train.model.families.olmo3 import OLMO3
from train.model.families.opensci import OPENSCI
from train.model.families.qwen import QWEN2, QWEN3
from train.model.families.smollm3 import SMOLLM3

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
    "olmo3": OLMO3,
    "opensci": OPENSCI,
}
TRAINED: dict[str, Trainable] = {
    name: family.training for name, family in FAMILIES.items() if family.training
}
ARCHITECTURES = tuple(name for family in FAMILIES.values() for name in family.architectures)
TRAINED_ARCHITECTURES = tuple(FAMILIES[name].architecture for name in TRAINED)
TRAJECTORIES = tuple(trajectory for family in FAMILIES.values() for trajectory in family.released)

LAYERS = "layers"  # of the decoder
# Where the linears of a block read, in the order in which they compute.
SITES = ("attention_in", "attention_out", "mlp_in", "mlp_out")


FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers, as transformers has them


def family_of(config: PretrainedConfig) -> Family:
    """Return the row of a model.

    UserError if the model has none, or a layer attends in another way than its row says.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UserError(
            f"architecture {config.model_type} is not known; give one of {', '.join(FAMILIES)}"
        )
    kinds = set(layer_kinds(config))
    known = {FULL} if family.windows == "none" else {FULL, SLIDING}
    # kinds that the class of the configuration does not read, and so does not compute
    unread = set(getattr(config, "layer_types", None) or kinds) - kinds
    if unknown := sorted((kinds - known) | unread):
        raise UserError(
            f"{config.model_type} with {unknown[0]} is not supported; give a model with"
            f" {' or '.join(sorted(known))}"
        )
    if SLIDING in kinds and not config.sliding_window:
        raise UserError(
            f"{config.model_type} has layers of {SLIDING} but no sliding_window; give both or none"
        )
    return family


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Return the kind of each layer, which says what its queries see."""
    if hasattr(type(config), "layer_types"):
        kinds: list[str] = config.layer_types
        return kinds
    # one window is for all layers
    kind = SLIDING if getattr(config, "sliding_window", None) else FULL
    return [kind] * config.num_hidden_layers


def window_of(config: PretrainedConfig, kind: str) -> int | None:
    """Return the tokens that a query of a layer sees, its own included; None: all before."""
    return config.sliding_window if kind == SLIDING else None
