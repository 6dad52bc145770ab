"""Decoder blocks as dual layers: a file for each arrangement of modules, and the table of all."""

from transformers import PretrainedConfig

from base.errors import UserError
from curvature.architectures import gpt_neox, olmo2, pre_norm
from curvature.architectures.parts import Architecture

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
    """Return the row of a model; UserError where there is none that spells out its settings."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise UserError(
            f"curvature knows {', '.join(ARCHITECTURES)}, this model is {config.model_type}; give"
            " one of those"
        )
    settings = config.to_dict() | (config.rope_parameters or {})
    for name, known in (SETTINGS_OF_ALL | dict(architecture.settings)).items():
        held = settings.get(name)
        unknown = {
            str(one)
            for one in (held if isinstance(held, list) else [held])
            if one not in (None, known)
        }
        if unknown:
            raise UserError(
                f"curvature knows {config.model_type} with {name} {known}, this model has"
                f" {', '.join(sorted(unknown))}; give one without"
            )
    return architecture
