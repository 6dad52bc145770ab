"""Qwen2 (arXiv 2407.10671), a Llama with biases, and Qwen3, with norms of queries and keys."""

from train.model.families.family import (
    GATED_LINEARS,
    MEGATRON_BIASES,
    MEGATRON_LINEARS,
    MEGATRON_NORMS_BEFORE,
    NORMS_BEFORE,
    QUERY_KEY_VALUE,
    Family,
    Trainable,
)

QWEN2 = Family(
    title="Qwen2",
    architecture="Qwen2ForCausalLM",
    windows="one_rotary",
    training=Trainable(
        layer={**GATED_LINEARS, **NORMS_BEFORE},
        biases=QUERY_KEY_VALUE,
        settings={"use_sliding_window": False},
        megatron={**MEGATRON_LINEARS, **MEGATRON_BIASES, **MEGATRON_NORMS_BEFORE},
    ),
)
QWEN3 = Family(
    title="Qwen3",
    architecture="Qwen3ForCausalLM",
    query_key_norm="heads",
    windows="one_rotary",
    training=Trainable(
        layer={
            **GATED_LINEARS,
            "self_attn.q_norm": ("head",),
            "self_attn.k_norm": ("head",),
            **NORMS_BEFORE,
        },
        settings={"attention_bias": False, "use_sliding_window": False},
        states_head_dim=True,
    ),
)
