"""Architectures that can be measured, told by config.json alone: before weights are fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from base.errors import UserError
from base.reading import parse_json

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PretrainedConfig

MEASURABLE = {  # by the type in config.json, the class of the model
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "apertus": "ApertusForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
}


def check_measurable(content: bytes, place: str) -> None:
    """Raise UserError unless a model with this config.json can be quantized and measured.

    Code beside a model is never run: a model type that transformers does not have is refused.
    """
    fields = parse_json(content, f"config.json of {place}", "give another model")
    if not isinstance(fields, dict):
        raise UserError(f"config.json of {place} is not a JSON object; give another model")
    kind, classes = fields.get("model_type"), fields.get("architectures") or ["none"]
    known = f"give a model of {', '.join(MEASURABLE)}"
    if kind not in MEASURABLE:
        code = ", code of its own that is never run" if "auto_map" in fields else ""
        raise UserError(f"{place} cannot be measured: its type is {kind!r}{code}; {known}")
    if classes[0] != MEASURABLE[kind]:
        raise UserError(f"{place} cannot be measured: it is a {classes[0]}; {known}")
    if attends_in_windows(_config(fields, place)):
        raise UserError(
            f"{place} cannot be measured: {kind} with sliding windows is not supported; give a"
            " model with full attention"
        )


def _config(fields: dict[str, Any], place: str) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    own = {key: value for key, value in fields.items() if key != "model_type"}
    try:
        config: PretrainedConfig = AutoConfig.for_model(fields["model_type"], **own)
    except (ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise UserError(
            f"config.json of {place}: {' '.join(str(error).split())[:200]}; give another model"
        ) from None
    return config


def attends_in_windows(config: PretrainedConfig) -> bool:
    """Return whether a layer of a model does not attend to all tokens before."""
    kinds = getattr(config, "layer_types", None)  # without it one window is for all layers
    if kinds:
        return set(kinds) != {"full_attention"}
    return bool(getattr(config, "sliding_window", None))
