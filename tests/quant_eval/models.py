"""A tiny random model of every architecture as an HF directory, read block by block or whole, and
texts for it.

Shapes: T tokens of a block.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.hf.configuration import configuration
from quant_eval.model.streamed import StreamedModel
from quant_eval.settings import RunSettings
from train.data.prepare import prepare

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
YARN_IN_FULL = {  # as in the long context of Olmo 3
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
# name -> model type and what differs from its defaults
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("olmo2", {"num_key_value_heads": 4}),
    "olmo": ("olmo", {"num_key_value_heads": 4, "clip_qkv": 0.5}),
    "llama": ("llama", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
    "llama-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"num_key_value_heads": 2, "no_rope_layers": [1, 0, 1]}),
    "apertus": (
        "apertus",
        {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "olmo3": (
        "olmo3",
        {"num_key_value_heads": 2, "sliding_window": 8, "rope_parameters": YARN_IN_FULL}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "mistral-windows": ("mistral", {"num_key_value_heads": 2, "sliding_window": 8}),
    "opensci": (
        "opensci",
        {"attention_bias": True, "mlp_bias": True, "qk_layernorm": True}
        | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
}


def run_settings(calibration: Path, evaluation: Path, **changes: Any) -> RunSettings:
    """Small settings of a run."""
    given = {"calibration_sequences": 24, "eval_tokens": 5000} | changes
    return RunSettings(calibration=calibration, eval=evaluation, **given)


def random_model(name: str, **changes: Any) -> Any:
    """Random weights, norms and biases included: at their initial 1 and 0 a swapped or dropped
    one would go unseen.
    """
    model_type, settings = ARCHITECTURES[name]
    config = configuration(model_type, **(SHAPE | settings | changes))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "norm" in key and key.endswith("weight"):
                weight.uniform_(0.5, 1.5)
            elif "act_fn" in key:
                weight.uniform_(0.2, 1.0)
            else:
                weight.normal_(std=0.15)
    return model


def make_model(directory: Path, name: str, **changes: Any) -> Path:
    """The HF directory of a random model."""
    random_model(name, **changes).save_pretrained(directory)
    return directory


def token_file(prefix: Path, texts: Iterable[str], tokenizer_dir: Path) -> Path:
    """A token file of texts, each a document."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    source = prefix.with_suffix(".jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([source], tokenizer_dir, prefix)
    return prefix


def open_model(directory: Path, dtype: torch.dtype = torch.float32) -> StreamedModel:
    """The model read block by block, on the CPU."""
    return StreamedModel(directory, HFWeights(directory), dtype, torch.device("cpu"))


@torch.no_grad()
def mean_loss(model: Any, blocks: Iterable[np.ndarray]) -> float:
    """Nats per target of blocks [T], one at a time; all but the first token are targets."""
    nll = targets = 0.0
    for block_T in blocks:
        ids_1T = torch.from_numpy(block_T)[None]
        logits_TV = model(ids_1T[:, :-1], use_cache=False).logits[0].double()
        nll -= float(logits_TV.log_softmax(-1).gather(-1, ids_1T[0, 1:, None]).sum())
        targets += len(block_T) - 1
    return nll / targets
