"""Small HF directories with the files and keys that published ones have."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.quant_eval.models import make_model

WEIGHTS = "model.safetensors"
ROPE = {"rope_type": "default"}
KINDS = ("pythia", "old-llama", "old-qwen2", "tied-copy", "index-of-one", "other-formats")


def make_published(directory: Path, kind: str) -> Path:
    """Make one of `KINDS`; transformers reads each as the model that was made."""
    MAKERS[kind](directory)
    return directory


def logits_by_transformers(directory: Path, input_ids_BS: Tensor) -> Tensor:
    """Logits in fp32, of the model as `from_pretrained` reads it."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits: Tensor = model(input_ids_BS).logits
    return logits


def change_weights(directory: Path, **tensors: Tensor) -> dict[str, Tensor]:
    """Add tensors to the file of weights, or replace them; return all."""
    weights = load_file(directory / WEIGHTS) | tensors
    save_file(weights, directory / WEIGHTS, {"format": "pt"})
    return weights


def change_config(directory: Path, removed: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of config.json."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: config[key] for key in config if key not in removed}))


def shard(directory: Path, count: int = 2) -> None:
    """Cut the file of weights into several with their index."""
    weights = load_file(directory / WEIGHTS)
    files: dict[str, str] = {}
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        tensors = dict(list(weights.items())[number::count])
        save_file(tensors, directory / name, {"format": "pt"})
        files |= dict.fromkeys(tensors, name)
    (directory / WEIGHTS).unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def _frequencies(width: int) -> Tensor:
    return 1.0 / 10_000 ** (torch.arange(0, width, 2) / width)


def _pythia(directory: Path) -> None:
    """As EleutherAI/pythia-70m: fp16, buffers, no num_key_value_heads, pickled weights beside."""
    make_model(
        directory,
        "gpt_neox",
        rope_parameters=ROPE | {"rope_theta": 5_000.0, "partial_rotary_factor": 0.5},
    )
    weights = {name: weight.half() for name, weight in load_file(directory / WEIGHTS).items()}
    for layer in range(3):
        prefix = f"gpt_neox.layers.{layer}.attention"
        mask = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
        weights[f"{prefix}.bias"] = mask
        weights[f"{prefix}.masked_bias"] = torch.tensor(-1e9)
        weights[f"{prefix}.rotary_emb.inv_freq"] = _frequencies(4)
    save_file(weights, directory / WEIGHTS, {"format": "pt"})
    torch.save({"gpt_neox.embed_in.weight": torch.zeros(3)}, directory / "pytorch_model.bin")
    change_config(
        directory,
        removed=("rope_parameters", "dtype", "num_key_value_heads", "attention_bias"),
        rotary_emb_base=5_000,
        rotary_pct=0.5,
        torch_dtype="float16",
        transformers_version="4.24.0",
    )


def _old(directory: Path, name: str) -> None:
    """As exports of 2023: rotary frequencies among the weights, the base at the top, shards."""
    biases = {"attention_bias": False, "mlp_bias": False} if name == "llama" else {}
    make_model(directory, name, rope_parameters=ROPE | {"rope_theta": 20_000.0}, **biases)
    buffers = {
        f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": _frequencies(8) for layer in range(3)
    }
    change_weights(directory, **buffers)
    shard(directory)
    change_config(
        directory,
        removed=("rope_parameters", "dtype"),
        rope_theta=20_000.0,
        rope_scaling=None,
        torch_dtype="float32",
    )


def _tied_copy(directory: Path) -> None:
    """A tied model whose head is in the file too."""
    weights = load_file(make_model(directory, "llama-tied") / WEIGHTS)
    change_weights(directory, **{"lm_head.weight": weights["model.embed_tokens.weight"].clone()})


def _index_of_one(directory: Path) -> None:
    """An index that names the one file there is."""
    weights = load_file(make_model(directory, "olmo2") / WEIGHTS)
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, WEIGHTS)}
    (directory / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def _other_formats(directory: Path) -> None:
    """Other weights in files that transformers reads only where it is asked to, or never."""
    weights = load_file(make_model(directory, "llama") / WEIGHTS)
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    save_file(
        {name: weight.half() for name, weight in zeros.items()},
        directory / "model.fp16.safetensors",
        {"format": "pt"},
    )
    save_file(zeros, directory / "consolidated.safetensors", {"format": "pt"})
    torch.save(zeros, directory / "pytorch_model.bin")


MAKERS = {
    "pythia": _pythia,
    "old-llama": lambda directory: _old(directory, "llama"),
    "old-qwen2": lambda directory: _old(directory, "qwen2"),
    "tied-copy": _tied_copy,
    "index-of-one": _index_of_one,
    "other-formats": _other_formats,
}
