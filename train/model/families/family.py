"""The form of a row of the table of model families. Needs neither torch nor transformers.

Every block here is attention and then an MLP, each with linears that read the same input, something
in between, and one linear that writes to the residual stream. What differs is named by a few
arrangements; code that computes with them matches on these, never on a family's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from train.model.families.released import Trajectory

# head: of one; query, key_value: of all heads of their kind; qkv: of queries, keys and values.
Size = Literal["hidden", "wide", "head", "query", "key_value", "qkv"]
Initializer = Literal["truncated_normal", "normal"]

NormKind = Literal["rms", "layer", "bare"]  # bare: a LayerNorm without parameters
QueryKeyNorm = Literal["none", "heads", "whole"]  # head by head, or over all heads at once
Residual = Literal["sequential", "configured"]  # configured: parallel where config.json says so
Activation = Literal["swiglu", "xielu", "gelu"]
# none: all layers attend to all tokens before; else config.json says which attend in windows, with
# one rotary embedding for all layers, or one for each kind.
Windows = Literal["none", "one_rotary", "rotary_by_kind"]

HIDDEN_ACTS: dict[Activation, str] = {"swiglu": "silu", "xielu": "xielu", "gelu": "gelu"}
# Shapes of the weights of attention and of a gated MLP, in the order of the model.
GATED_LINEARS: Mapping[str, tuple[Size, ...]] = MappingProxyType(
    {
        "self_attn.q_proj": ("query", "hidden"),
        "self_attn.k_proj": ("key_value", "hidden"),
        "self_attn.v_proj": ("key_value", "hidden"),
        "self_attn.o_proj": ("hidden", "query"),
        "mlp.gate_proj": ("wide", "hidden"),
        "mlp.up_proj": ("wide", "hidden"),
        "mlp.down_proj": ("hidden", "wide"),
    }
)
NORMS_BEFORE: Mapping[str, tuple[Size, ...]] = MappingProxyType(
    {"input_layernorm": ("hidden",), "post_attention_layernorm": ("hidden",)}
)
NO_NAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class MegatronParameter:
    """A parameter of megatron-core: the HF parameters in it, their fusion, and how it is split.

    Attributes:
        hf_names: within a layer, or whole outside the layers.
        fusion: of its rows: interleaved by query group, or gate rows before up rows.
        shard_axis: the axis that tensor parallelism splits; None: every rank holds the whole.
    """

    hf_names: tuple[str, ...]
    fusion: Literal["none", "qkv", "gate_up"] = "none"
    shard_axis: int | None = None


def _fused(hf_names: tuple[str, ...], part: str) -> MegatronParameter:
    """Return queries, keys and values in one: the weights of their linears, or the biases."""
    return MegatronParameter(tuple(f"{name}.{part}" for name in hf_names), "qkv", shard_axis=0)


QUERY_KEY_VALUE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Names in megatron-core mean the same in every family.
MEGATRON_OUTSIDE: Mapping[str, MegatronParameter] = MappingProxyType(
    {
        "embedding.word_embeddings.weight": MegatronParameter(
            ("model.embed_tokens.weight",), shard_axis=0
        ),
        "decoder.final_layernorm.weight": MegatronParameter(("model.norm.weight",)),
        "output_layer.weight": MegatronParameter(("lm_head.weight",), shard_axis=0),
    }
)
MEGATRON_LINEARS: Mapping[str, MegatronParameter] = MappingProxyType(
    {
        "self_attention.linear_qkv.weight": _fused(QUERY_KEY_VALUE, "weight"),
        "self_attention.linear_proj.weight": MegatronParameter(
            ("self_attn.o_proj.weight",), shard_axis=1
        ),
        "mlp.linear_fc1.weight": MegatronParameter(
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up", shard_axis=0
        ),
        "mlp.linear_fc2.weight": MegatronParameter(("mlp.down_proj.weight",), shard_axis=1),
    }
)
MEGATRON_BIASES = {"self_attention.linear_qkv.bias": _fused(QUERY_KEY_VALUE, "bias")}
MEGATRON_NORMS_BEFORE = {
    "input_layernorm.weight": MegatronParameter(("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": MegatronParameter(("post_attention_layernorm.weight",)),
}


@dataclass(frozen=True, kw_only=True)
class Trainable:
    """The parameters and the configuration of the models that runs train.

    Attributes:
        layer: shape of the weight of every module of a layer, in the order of the model.
        biases: the modules that have a bias, of as many entries as their weight has rows.
        grouped_queries: several query heads may share a key and a value head.
        settings: fields of transformers' configuration that are the same for all models.
        norm_eps: the field of it that holds `ModelConfig.norm_eps`, or the only value there is.
        states_head_dim: it has a field for the width of a head, which may be any.
        released: fields of `ModelConfig` that all released models share.
        sizes: fields in which they differ, by name of the model.
        megatron: parameters of a layer in megatron-core; None: DeepSpeed alone trains the family.
    """

    layer: Mapping[str, tuple[Size, ...]]
    biases: tuple[str, ...] = ()
    grouped_queries: bool = True
    settings: Mapping[str, Any]
    norm_eps: str | float = "rms_norm_eps"
    states_head_dim: bool = False
    initializer: Initializer = "normal"
    released: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    megatron: Mapping[str, MegatronParameter] | None = None


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture: its modules' names as transformers has them, and their arrangement.

    Attributes:
        title: in words.
        architecture: transformers' class of the model.
        spellings: of its name in files, besides that.
        in_transformers: transformers has the class, and engines read checkpoints of it.
        norms: "before" a part reads the residual stream, or "after" it and before it is added.
        norm, query_key_norm, residual, activation: of a block.
        rotates_parts: a share of each head may rotate, else whole heads do.
        windows: sliding windows, as far as transformers' class has them.
        decoder, embedding, final_norm, head: of the model.
        attention, attention_norm, reading, writing: the attention of a block and its linears.
        mlp, mlp_norm, mlp_reading, mlp_writing: the MLP of a block and its linears.
        head_in_files: the head's name in files, where it stays as released.
        older_keys: what versions of transformers before 5 call fields of `rope_parameters`.
        legacy_buffers: pattern of constants of a layer that older versions wrote among weights.
        training: None: released models are measured, and none is trained here.
        released: trajectories of released models.
    """

    title: str
    architecture: str
    spellings: tuple[str, ...] = ()
    in_transformers: bool = True

    norms: Literal["before", "after"] = "before"
    norm: NormKind = "rms"
    query_key_norm: QueryKeyNorm = "none"
    residual: Residual = "sequential"
    activation: Activation = "swiglu"
    rotates_parts: bool = False
    windows: Windows = "none"

    decoder: str = "model"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    head: str = "lm_head"
    attention: str = "self_attn"
    attention_norm: str = "input_layernorm"
    reading: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    writing: str = "o_proj"
    mlp: str = "mlp"
    mlp_norm: str = "post_attention_layernorm"
    mlp_reading: tuple[str, ...] = ("gate_proj", "up_proj")
    mlp_writing: str = "down_proj"

    head_in_files: str = "lm_head"
    older_keys: Mapping[str, str] = NO_NAMES
    legacy_buffers: str | None = None
    training: Trainable | None = None
    released: tuple[Trajectory, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        """Return the names by which a config.json may call the class of the model."""
        return self.architecture, *self.spellings

    @property
    def centers(self) -> bool:
        """Tell if the norms subtract the mean."""
        return self.norm != "rms"

    @property
    def hidden_act(self) -> str:
        """Return transformers' name of the activation."""
        return HIDDEN_ACTS[self.activation]

    @property
    def embedding_weight(self) -> str:
        """Return the HF name of the embedding's weight, which is looked up and not multiplied."""
        return f"{self.decoder}.{self.embedding}.weight"

    @property
    def data_flow(self) -> tuple[tuple[str, ...], ...]:
        """Return the modules of a block in the order in which they compute.

        Modules of one place do not feed each other; a place may be empty. Both kinds of norms have
        a place of their own, so that all families have as many.
        """
        attention_norm, mlp_norm = (self.attention_norm,), (self.mlp_norm,)
        before = self.norms == "before"
        return (
            attention_norm if before else (),
            self.reading,
            () if self.query_key_norm == "none" else ("q_norm", "k_norm"),
            (self.writing,),
            mlp_norm if before else attention_norm,
            self.mlp_reading,
            (self.mlp_writing,),
            () if before else mlp_norm,
        )
