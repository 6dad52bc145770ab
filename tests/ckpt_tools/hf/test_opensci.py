"""open-sci-ref against what its published modules compute, written out from their description.

LAION-AI/Open-Sci-hf, sample/: a Llama with biases in every linear but the head, and an RMSNorm of
each head's queries and keys before rope. Shapes: L tokens, D features, E features of a head.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from base.errors import UserError
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.forward import stream_logits
from ckpt_tools.hf.model import load_hf_model
from train.model.families import ARCHITECTURES

HEADS, VALUE_HEADS, HEAD, WIDTH, WIDE, BLOCKS, WORDS = 4, 2, 6, 24, 40, 2, 50
TOKENS = torch.randint(0, WORDS, (2, 11), generator=torch.Generator().manual_seed(0))
# as the converter writes it, with the keys of transformers 4
CONFIG: dict[str, Any] = {
    "architectures": ["OpenSciForCausalLM"],
    "attention_bias": True,
    "auto_map": {"AutoModelForCausalLM": "modeling_opensci.OpensciForCausalLM"},
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": WIDE,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "mlp_bias": True,
    "model_type": "opensci",
    "num_attention_heads": HEADS,
    "num_hidden_layers": BLOCKS,
    "num_key_value_heads": VALUE_HEADS,
    "qk_layernorm": True,
    "rms_norm_eps": 1e-3,
    "rope_scaling": None,
    "rope_theta": 100.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.48.3",
    "vocab_size": WORDS,
}
LINEARS = {
    "self_attn.q_proj": (HEADS * HEAD, WIDTH),
    "self_attn.k_proj": (VALUE_HEADS * HEAD, WIDTH),
    "self_attn.v_proj": (VALUE_HEADS * HEAD, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD),
    "mlp.gate_proj": (WIDE, WIDTH),
    "mlp.up_proj": (WIDE, WIDTH),
    "mlp.down_proj": (WIDTH, WIDE),
}
NORMS = {
    "input_layernorm": WIDTH,
    "post_attention_layernorm": WIDTH,
    "self_attn.q_layernorm": HEAD,
    "self_attn.k_layernorm": HEAD,
}


def make_published(directory: Path, **changes: Any) -> Path:
    """Random weights under the published names, with the configuration, and code beside them."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.4

    weights = {"model.embed_tokens.weight": drawn(WORDS, WIDTH)}
    weights["model.norm.weight"] = 1 + drawn(WIDTH)
    for index in range(BLOCKS):
        prefix = f"model.layers.{index}"
        for name, (rows, columns) in LINEARS.items():
            weights[f"{prefix}.{name}.weight"] = drawn(rows, columns)
            weights[f"{prefix}.{name}.bias"] = drawn(rows)
        for name, size in NORMS.items():
            weights[f"{prefix}.{name}.weight"] = 1 + drawn(size)
    directory.mkdir()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    (directory / "modeling_opensci.py").write_text("raise SystemExit('it was run')")
    return directory


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]).sqrt()


def turned(x_LE: Tensor) -> Tensor:
    """Pairs (i, i + E/2) as complex numbers, turned by position x theta^(-2i/E)."""
    pairs = torch.complex(x_LE[:, : HEAD // 2], x_LE[:, HEAD // 2 :])
    frequencies = CONFIG["rope_theta"] ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    angles = torch.outer(torch.arange(len(x_LE), dtype=torch.float64), frequencies)
    pairs = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def witness(weights: dict[str, Tensor], tokens_L: Tensor) -> Tensor:
    """Logits of one sequence in float64, head by head and query by query."""
    table = weights["model.embed_tokens.weight"]
    x_LD = table[tokens_L]
    for index in range(BLOCKS):

        def of(name: str, index: int = index) -> Tensor:
            return weights[f"model.layers.{index}.{name}"]

        def linear(name: str, y: Tensor) -> Tensor:
            return y @ of(f"{name}.weight").T + of(f"{name}.bias")

        read = normed(x_LD, of("input_layernorm.weight"))
        queries, keys, values = (
            linear(f"self_attn.{name}_proj", read).split(HEAD, -1) for name in "qkv"
        )
        mixed = []
        for head, query in enumerate(queries):
            shared = head // (HEADS // VALUE_HEADS)
            query = turned(normed(query, of("self_attn.q_layernorm.weight")))
            key = turned(normed(keys[shared], of("self_attn.k_layernorm.weight")))
            rows = [
                (query[place] @ key[: place + 1].T / HEAD**0.5).softmax(0)
                @ values[shared][: place + 1]
                for place in range(len(tokens_L))
            ]
            mixed.append(torch.stack(rows))
        x_LD = x_LD + linear("self_attn.o_proj", torch.cat(mixed, -1))
        read = normed(x_LD, of("post_attention_layernorm.weight"))
        gate = linear("mlp.gate_proj", read)
        inner = gate / (1 + (-gate).exp()) * linear("mlp.up_proj", read)
        x_LD = x_LD + linear("mlp.down_proj", inner)
    return normed(x_LD, weights["model.norm.weight"]) @ table.T


def test_logits_are_those_of_the_published_modules(tmp_path):
    directory = make_published(tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    exact = {name: weight.double() for name, weight in weights.items()}
    expected = torch.stack([witness(exact, tokens_L) for tokens_L in TOKENS]).float()
    for attention in ("eager", "sdpa"):
        model = load_hf_model(directory, torch.float32, attention, ARCHITECTURES)
        with torch.no_grad():
            logits = model(TOKENS, use_cache=False).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stream_logits(directory, TOKENS), expected, rtol=1e-4, atol=1e-4)
    # the names of the files are the model's own
    assert weights.keys() == model.state_dict().keys() - {"lm_head.weight"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"qk_layernorm": False}, "without qk_layernorm is not supported"),
        ({"attention_bias": False}, "self_attn.k_proj.bias"),  # biases in the files alone
    ],
)
def test_other_models_of_the_type_are_refused(tmp_path, changes, reason):
    directory = make_published(tmp_path / "model", **changes)
    with pytest.raises(UserError, match=reason):
        load_hf_model(directory, torch.float32, architectures=ARCHITECTURES)


def test_fields_left_out_have_the_published_defaults(tmp_path):
    left_out = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_theta")
    directory = make_published(tmp_path / "model")
    content = {key: value for key, value in CONFIG.items() if key not in left_out}
    (directory / "config.json").write_text(json.dumps(content))
    config = read_config(directory)
    assert (config.head_dim, config.num_key_value_heads) == (WIDTH // HEADS, HEADS)
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-6, 10_000.0)
