"""The configuration of a model."""

from typing import Literal, Self

from pydantic import Field, model_validator

from base.frozen import Frozen

# Twenty times the deepest model's: what is laid out by layer takes time and memory in proportion.
MOST_LAYERS = 4096


class ModelConfig(Frozen):
    """A causal language model in transformers' terms; `family` is its `model_type`."""

    family: Literal["olmo2", "llama", "gpt_neox"] = "olmo2"
    vocab_size: int = Field(gt=0, description="rows of the embedding, padding included")
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(
        gt=0, description="width of the MLP; of gate and of up, each, where it is gated"
    )
    num_hidden_layers: int = Field(gt=0, le=MOST_LAYERS)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    rope_theta: float = Field(default=500_000.0, gt=0)
    rotary_fraction: float = Field(
        default=1.0, gt=0, le=1, description="share of a head that rotates; gpt_neox 0.25"
    )
    norm_eps: float = Field(default=1e-6, gt=0, description="of RMSNorm, of LayerNorm for gpt_neox")
    initializer_range: float = Field(default=0.02, gt=0, description="std of every initial matrix")
    initializer: Literal["truncated_normal", "normal"] = Field(
        default="truncated_normal",
        description="at 3 std, as OLMo2; 'normal' is transformers' own for llama, gpt_neox",
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide over num_attention_heads"
                f" {self.num_attention_heads}"
            )
        rotary_size = self.head_dim * self.rotary_fraction
        if rotary_size % 2:
            raise ValueError(f"{rotary_size:g} dimensions of a head rotate; make them even")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} does not divide over"
                f" num_key_value_heads {self.num_key_value_heads}"
            )
        if self.family == "gpt_neox" and self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                "gpt_neox has no grouped queries; set num_key_value_heads to num_attention_heads"
            )
        if self.family != "gpt_neox" and self.rotary_fraction != 1:
            raise ValueError(f"{self.family} rotates whole heads; set rotary_fraction to 1")
        return self

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.hidden_size // self.num_attention_heads
