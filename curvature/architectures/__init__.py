"""Decoder blocks as dual layers: one file for each arrangement of transformers' modules, and the table of all."""

from transformers import PretrainedConfig

from curvature.architectures import gpt_neox, olmo2, pre_norm
from curvature.architectures.parts import Architecture
from train.command import UserError

ARCHITECTURES: dict[str, Architecture] = {
    "olmo2": olmo2.ARCHITECTURE,
    "llama": pre_norm.LLAMA,
    "mistral": pre_norm.MISTRAL,
    "qwen2": pre_norm.LLAMA,
    "qwen3": pre_norm.QWEN3,
    "smollm3": pre_norm.SMOLLM3,
    "olmo": pre_norm.OLMO,
    "apertus": pre_norm.APERTUS,
    "gpt_neox": gpt_neox.ARCHITECTURE,
}
SETTINGS_OF_ALL = {"is_causal": True, "layer_types": "full_attention"}


def architecture_of(config: PretrainedConfig) -> Architecture:
    """The row of a model; UserError for one that has none, or whose settings the dual layers do not spell out."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise UserError(
            f"the dual layers know {', '.join(ARCHITECTURES)}, this model is {config.model_type}; use --route "
            f"finite-difference"
        )
    settings = config.to_dict() | (config.rope_parameters or {})
    for name, known in (SETTINGS_OF_ALL | dict(architecture.settings)).items():
        held = settings.get(name)
        unknown = {str(one) for one in (held if isinstance(held, list) else [held]) if one not in (None, known)}
        if unknown:
            raise UserError(
                f"the dual layers know {config.model_type} with {name} {known}, this model has "
                f"{', '.join(sorted(unknown))}; use --route finite-difference"
            )
    return architecture
