"""open-sci-ref as modules of transformers: Qwen3 with biases in the MLP, and norms named otherwise.

The code beside its weights (LAION-AI/Open-Sci-hf, sample/) is never run, and transformers 5 could
not. A test holds these modules against what that code computes.
"""

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3ForCausalLM,
    Qwen3MLP,
)


@strict
class OpensciConfig(Qwen3Config):
    """Configuration with the fields and the defaults of the published one, where they differ."""

    model_type = "opensci"
    has_no_defaults_at_init = True  # as not all defaults go together

    num_key_value_heads: int | None = None
    head_dim: int | None = None  # type: ignore[assignment]
    mlp_bias: bool = False
    qk_layernorm: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the width of a head.

        ValueError: queries and keys are not normed, which no published model is.
        """
        if not self.qk_layernorm:
            raise ValueError("opensci without qk_layernorm is not supported")
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


class OpensciAttention(Qwen3Attention):
    """Attention whose norms have the names of the published weights."""

    def __init__(self, config: OpensciConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.q_layernorm, self.k_layernorm = (
            self._modules.pop(name) for name in ("q_norm", "k_norm")
        )

    # what the forward pass of Qwen3 reads
    @property
    def q_norm(self) -> Any:  # type: ignore[override]
        """Return the norm of queries."""
        return self.q_layernorm

    @property
    def k_norm(self) -> Any:  # type: ignore[override]
        """Return the norm of keys."""
        return self.k_layernorm


class OpensciMLP(Qwen3MLP):
    """Gated MLP with biases."""

    def __init__(self, config: OpensciConfig) -> None:
        super().__init__(config)
        for name in ("gate_proj", "up_proj", "down_proj"):
            plain = getattr(self, name)
            biased = nn.Linear(plain.in_features, plain.out_features, bias=config.mlp_bias)
            setattr(self, name, biased)


class OpensciForCausalLM(Qwen3ForCausalLM):
    """Causal language model."""

    config_class = OpensciConfig

    def __init__(self, config: OpensciConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = OpensciAttention(config, index)
            layer.mlp = OpensciMLP(config)
        self.post_init()


def register() -> None:
    """Let transformers' automatic classes find the model by its type."""
    AutoConfig.register(OpensciConfig.model_type, OpensciConfig, exist_ok=True)
    AutoModelForCausalLM.register(OpensciConfig, OpensciForCausalLM, exist_ok=True)
