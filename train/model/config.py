"""The configuration of a model; its parameters by HF name, and its transformers configuration.

What differs between families is in their rows: `train.model.families`.
"""

import math
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from base.frozen import Frozen
from base.names import take_one_of
from train.model.families import FAMILIES, LAYERS, TRAINED
from train.model.families.family import Family, Initializer, Size, Trainable

# Twenty times the deepest model's: what is laid out by layer takes time and memory in proportion.
MOST_LAYERS = 4096


class Llama3Scaling(Frozen):
    """A rotary embedding for longer texts, as of Llama 3.1: slow rotations are slowed down.

    Those with more than `high_freq_factor` turns over the original length stay as they are, those
    with less than `low_freq_factor` turn by 1 / `factor`; between them it is interpolated.
    """

    factor: float = Field(ge=1)
    low_freq_factor: float = Field(gt=0, description="turns over the original length")
    high_freq_factor: float = Field(gt=0, description="turns over the original length")
    original_max_position_embeddings: int = Field(gt=0, description="tokens")

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor:g} is not below high_freq_factor"
                f" {self.high_freq_factor:g}"
            )
        return self


Shapes = dict[str, tuple[int, ...]]


class ModelConfig(Frozen):
    """A causal language model in transformers' terms; `family` is its `model_type`."""

    family: str = Field(default="olmo2", description=f"one of {', '.join(TRAINED)}")
    vocab_size: int = Field(gt=0, description="rows of the embedding, padding included")
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(
        gt=0, description="width of the MLP; of gate and of up, each, where it is gated"
    )
    num_hidden_layers: int = Field(gt=0, le=MOST_LAYERS)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int | None = Field(
        default=None, gt=0, description="width of a head; None: hidden_size / num_attention_heads"
    )
    rope_theta: float = Field(default=500_000.0, gt=0)
    rope_scaling: Llama3Scaling | None = None
    rotary_fraction: float = Field(
        default=1.0, gt=0, le=1, description="share of a head that rotates; gpt_neox 0.25"
    )
    norm_eps: float = Field(default=1e-6, gt=0, description="of RMSNorm, of LayerNorm for gpt_neox")
    tie_word_embeddings: bool = Field(
        default=False, description="the head multiplies with the embedding's weight"
    )
    initializer_range: float = Field(default=0.02, gt=0, description="std of every initial matrix")
    initializer: Initializer = Field(
        default="truncated_normal",
        description="at 3 std, as OLMo2; 'normal' is transformers' own for llama, gpt_neox",
    )

    @field_validator("family")
    @classmethod
    def _is_trained(cls, family: str) -> str:
        if family not in TRAINED:
            raise ValueError(f"'{family}' cannot be trained; {take_one_of(family, TRAINED)}")
        return family

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.head_dim is not None and not self.training.states_head_dim:
            raise ValueError(
                f"{self.family} has heads of hidden_size / num_attention_heads; remove head_dim"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} does not divide over num_attention_heads"
                f" {self.num_attention_heads}"
            )
        # Features rotate in pairs.
        rotary_size = self.head_size * self.rotary_fraction
        if rotary_size % 2:
            raise ValueError(f"{rotary_size:g} dimensions of a head rotate; make them even")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} does not divide over"
                f" num_key_value_heads {self.num_key_value_heads}"
            )
        is_grouped = self.num_key_value_heads != self.num_attention_heads
        if is_grouped and not self.training.grouped_queries:
            raise ValueError(
                f"{self.family} has no grouped queries; set num_key_value_heads to"
                " num_attention_heads"
            )
        if self.rotary_fraction != 1 and not self.row.rotates_parts:
            raise ValueError(f"{self.family} rotates whole heads; set rotary_fraction to 1")
        eps = self.training.norm_eps
        if isinstance(eps, float) and self.norm_eps != eps:
            raise ValueError(f"{self.family} has norms with {eps:g}; set norm_eps to that")
        return self

    @property
    def row(self) -> Family:
        """Return the row of its family."""
        return FAMILIES[self.family]

    @property
    def training(self) -> Trainable:
        """Return the part of the row that is about training."""
        return TRAINED[self.family]

    @property
    def head_size(self) -> int:
        """Return the width of one attention head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def rotates(self, layer: int) -> bool:
        """Tell if queries and keys of a layer, counted from 0, have the rotary embedding."""
        every = self.training.settings.get("no_rope_layer_interval")
        return every is None or (layer + 1) % every != 0

    @property
    def query_size(self) -> int:
        """Return the width of the queries of all heads."""
        return self.num_attention_heads * self.head_size

    @property
    def key_value_size(self) -> int:
        """Return the width of the keys, or of the values, of all heads."""
        return self.num_key_value_heads * self.head_size


def hf_settings(model: ModelConfig, sequence_length: int, eos_token_id: int) -> dict[str, Any]:
    """Return the keyword arguments of the family's transformers configuration.

    Everything is set: transformers' defaults are not those of the released models.
    """
    training = model.training
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling:
        rope |= {"rope_type": "llama3"} | model.rope_scaling.model_dump()
    settings: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": sequence_length,
        "initializer_range": model.initializer_range,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": None,
        "use_cache": True,
        "hidden_act": model.row.hidden_act,
        "rope_parameters": rope,
    }

    # Only families that have such a setting know the key.
    if isinstance(training.norm_eps, str):
        settings[training.norm_eps] = model.norm_eps
    if training.grouped_queries:
        settings["num_key_value_heads"] = model.num_key_value_heads
    if model.row.rotates_parts:
        rope["partial_rotary_factor"] = model.rotary_fraction
    if training.states_head_dim:
        settings["head_dim"] = model.head_size
    return settings | dict(training.settings)


def parameter_shapes(model: ModelConfig) -> Shapes:
    """Return the shape of every parameter by its HF name, in the order of the model.

    A head that is the embedding is no parameter of its own.
    """
    row, training, hidden = model.row, model.training, model.hidden_size
    sizes: dict[Size, int] = {
        "hidden": hidden,
        "wide": model.intermediate_size,
        "head": model.head_size,
        "query": model.query_size,
        "key_value": model.key_value_size,
        "qkv": model.query_size + 2 * model.key_value_size,
    }

    def parameters(parent: str, module: str, shape: tuple[int, ...]) -> Shapes:
        weight = {f"{parent}.{module}.weight": shape}
        has_bias = module in training.biases
        return weight | ({f"{parent}.{module}.bias": shape[:1]} if has_bias else {})

    table = (model.vocab_size, hidden)
    shapes: Shapes = {row.embedding_weight: table}
    for index in range(model.num_hidden_layers):
        for module, axes in training.layer.items():
            shape = tuple(sizes[axis] for axis in axes)
            shapes |= parameters(f"{row.decoder}.{LAYERS}.{index}", module, shape)
    if row.norm != "bare":
        shapes |= parameters(row.decoder, row.final_norm, (hidden,))
    if model.tie_word_embeddings:
        return shapes
    return shapes | {f"{row.head_in_files}.weight": table}


def multiplied_parameters(model: ModelConfig) -> int:
    """Return the parameters without the token embedding, unless it is the head as well.

    An embedding is looked up, a head is multiplied with.
    """
    looked_up = set() if model.tie_word_embeddings else {model.row.embedding_weight}
    shapes = parameter_shapes(model).items()
    return sum(math.prod(shape) for name, shape in shapes if name not in looked_up)


def hidden_matrices(model: ModelConfig) -> frozenset[str]:
    """Return HF names of the weights of linear layers but the output's."""
    # Embedding and head are outside of the layers; norms and biases are vectors.
    return frozenset(
        name
        for name, shape in parameter_shapes(model).items()
        if f".{LAYERS}." in name and len(shape) == 2
    )


def input_groups(model: ModelConfig) -> list[tuple[str, ...]]:
    """Return HF names of the weights of linears that read the same, group by group."""
    row = model.row
    parts = (
        (row.attention, row.reading),
        (row.attention, (row.writing,)),
        (row.mlp, row.mlp_reading),
        (row.mlp, (row.mlp_writing,)),
    )
    return [
        tuple(f"{row.decoder}.{LAYERS}.{layer}.{part}.{name}.weight" for name in names)
        for layer in range(model.num_hidden_layers)
        for part, names in parts
    ]


def residual_linears(model: ModelConfig, layer: int) -> tuple[str, str]:
    """Return HF names of the two weights of a layer whose outputs enter the residual stream.

    Tensor parallelism cuts their inputs, and the outputs of all others.
    """
    row = model.row
    prefix = f"{row.decoder}.{LAYERS}.{layer}"
    return (
        f"{prefix}.{row.attention}.{row.writing}.weight",
        f"{prefix}.{row.mlp}.{row.mlp_writing}.weight",
    )
