"""Every architecture of the dual layers, with each setting that changes what they compute."""

from typing import Any

PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
SCALED = {"rope_theta": 100.0, "original_max_position_embeddings": 4}
YARN = SCALED | {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = SCALED | {"rope_type": "llama3", "factor": 8.0}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
BY_KIND = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
BY_KIND |= {"full_attention": YARN}
WINDOWS = {"sliding_window": 3}  # of 7 tokens
GROUPED = {"num_key_value_heads": 1}
TIED = {"tie_word_embeddings": True}

VARIANTS: dict[str, dict[str, Any]] = {
    "olmo2": {"model_type": "olmo2"} | GROUPED,
    "olmo2-biases-tied": {"model_type": "olmo2", "attention_bias": True} | TIED,
    "llama-biases-yarn": (
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}
    ),
    "llama-tied": (
        {"model_type": "llama", "head_dim": 6, "rope_parameters": LLAMA3} | TIED | GROUPED
    ),
    "mistral": {"model_type": "mistral", "sliding_window": None} | GROUPED,
    "qwen2-tied": {"model_type": "qwen2"} | TIED | GROUPED,
    "qwen3": {"model_type": "qwen3", "head_dim": 6} | GROUPED,
    "smollm3-tied": {"model_type": "smollm3", "no_rope_layers": [1, 0]} | TIED | GROUPED,
    "olmo": {"model_type": "olmo"} | GROUPED,
    "olmo-clipped": {"model_type": "olmo", "clip_qkv": 2.5},
    "apertus": {"model_type": "apertus"} | GROUPED,
    "olmo3": {"model_type": "olmo3", "rope_parameters": BY_KIND}
    | {"layer_types": ["sliding_attention", "full_attention"]}
    | WINDOWS
    | GROUPED,
    "mistral-windows": {"model_type": "mistral"} | WINDOWS,
    "qwen3-windows": {"model_type": "qwen3", "head_dim": 6, "use_sliding_window": True}
    | {"max_window_layers": 1}
    | WINDOWS,
    "opensci-tied": (
        {"model_type": "opensci", "attention_bias": True, "mlp_bias": True, "qk_layernorm": True}
        | TIED
    ),
    "gpt_neox": {"model_type": "gpt_neox", "rope_parameters": PARTIAL},
    "gpt_neox-sequential-tied": (
        {"model_type": "gpt_neox", "rope_parameters": PARTIAL, "use_parallel_residual": False}
        | {"attention_bias": False, "tie_word_embeddings": True}
    ),
}
