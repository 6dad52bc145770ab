"""The model families: transformers configuration, and parameter shapes by HF name."""

from typing import Any

from train.model.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def hf_settings(model: ModelConfig, sequence_length: int, eos_token_id: int) -> dict[str, Any]:
    """Return the keyword arguments of the family's transformers configuration.

    Everything is set: transformers' defaults are not those of the released models.
    """
    # Fields of all families.
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    settings: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": sequence_length,
        "initializer_range": model.initializer_range,
        "attention_dropout": 0.0,
        "attention_bias": model.family == "gpt_neox",
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
        "use_cache": True,
    }

    # GPT-NeoX has LayerNorm, no gate, no grouped queries, and rotates a part of each head.
    if model.family == "gpt_neox":
        return settings | {
            "hidden_act": "gelu",
            "hidden_dropout": 0.0,
            "layer_norm_eps": model.norm_eps,
            "use_parallel_residual": True,
            "rope_parameters": rope | {"partial_rotary_factor": model.rotary_fraction},
        }

    settings |= {
        "hidden_act": "silu",
        "num_key_value_heads": model.num_key_value_heads,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": rope,
    }
    return settings | (
        {"mlp_bias": False, "head_dim": model.head_dim} if model.family == "llama" else {}
    )


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Return the shape of every parameter by its HF name, in the order of the model."""
    hidden, vocabulary = model.hidden_size, model.vocab_size
    if model.family == "gpt_neox":
        layer, layers = _gpt_neox_layer(model), "gpt_neox.layers"
        before = {"gpt_neox.embed_in.weight": (vocabulary, hidden)}
        after = {f"gpt_neox.final_layer_norm.{part}": (hidden,) for part in ("weight", "bias")}
        head = "embed_out.weight"
    else:
        layer, layers = _llama_layer(model), "model.layers"
        before = {"model.embed_tokens.weight": (vocabulary, hidden)}
        after, head = {"model.norm.weight": (hidden,)}, "lm_head.weight"
    inside = {
        f"{layers}.{index}.{name}": shape
        for index in range(model.num_hidden_layers)
        for name, shape in layer.items()
    }
    return {**before, **inside, **after, head: (vocabulary, hidden)}


def hidden_matrices(model: ModelConfig) -> frozenset[str]:
    """Return HF names of the weights of linear layers but the output's."""
    return frozenset(
        name
        for name, shape in parameter_shapes(model).items()
        if ".layers." in name and len(shape) == 2
    )


def residual_linears(model: ModelConfig, layer: int) -> tuple[str, str]:
    """Return HF names of the two weights of a layer whose outputs enter the residual stream.

    Tensor parallelism cuts their inputs, and the outputs of all others.
    """
    if model.family == "gpt_neox":
        prefix = f"gpt_neox.layers.{layer}"
        return f"{prefix}.attention.dense.weight", f"{prefix}.mlp.dense_4h_to_h.weight"
    prefix = f"model.layers.{layer}"
    return f"{prefix}.self_attn.o_proj.weight", f"{prefix}.mlp.down_proj.weight"


def _llama_layer(model: ModelConfig) -> Shapes:
    hidden, wide = model.hidden_size, model.intermediate_size
    key_value = model.num_key_value_heads * model.head_dim
    norms: Shapes = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    if model.family == "olmo2":
        norms = {
            "self_attn.q_norm": (hidden,),
            "self_attn.k_norm": (key_value,),
            "post_attention_layernorm": (hidden,),
            "post_feedforward_layernorm": (hidden,),
        }
    layer: Shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (key_value, hidden),
        "self_attn.v_proj": (key_value, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        **norms,
    }
    return {f"{name}.weight": shape for name, shape in layer.items()}


def _gpt_neox_layer(model: ModelConfig) -> Shapes:
    hidden, wide = model.hidden_size, model.intermediate_size
    layer: Shapes = {
        "attention.query_key_value": (3 * hidden, hidden),
        "attention.dense": (hidden, hidden),
        "mlp.dense_h_to_4h": (wide, hidden),
        "mlp.dense_4h_to_h": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return {
        f"{name}.{part}": shape if part == "weight" else shape[:1]
        for name, shape in layer.items()
        for part in ("weight", "bias")
    }
