"""Models as dual layers: the table of all, by their type in the configuration."""

from transformers import PretrainedConfig

from base.errors import UserError
from curvature.architectures import blocks
from curvature.architectures.parts import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    "olmo2": blocks.OLMO2,
    "llama": blocks.LLAMA,
    "mistral": blocks.MISTRAL,
    "qwen2": blocks.LLAMA,
    "qwen3": blocks.QWEN3,
    "smollm3": blocks.LLAMA,
    "olmo": blocks.OLMO,
    "apertus": blocks.APERTUS,
    "gpt_neox": blocks.GPT_NEOX,
}
SETTINGS_OF_ALL = {"is_causal": True, "layer_types": "full_attention"}


def architecture_of(config: PretrainedConfig) -> Architecture:
    """Return the row of a model.

    UserError if there is none, or the model has settings that its row does not compute.
    """
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise UserError(
            f"curvature knows {', '.join(ARCHITECTURES)}, this model is {config.model_type}; give"
            " one of those"
        )
    settings = config.to_dict() | (config.rope_parameters or {})
    for name, expected in (SETTINGS_OF_ALL | dict(architecture.settings)).items():
        values = settings.get(name)
        unknown = {
            str(value)
            for value in (values if isinstance(values, list) else [values])
            if value not in (None, expected)
        }
        if unknown:
            raise UserError(
                f"curvature knows {config.model_type} with {name} {expected}, this model has"
                f" {', '.join(sorted(unknown))}; give one without"
            )
    return architecture
