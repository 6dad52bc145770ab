"""A small OLMo2 trained on synthetic text, for measurements whose noise has to be that of a
trained model.

Shapes: N sequences, S positions of a sequence, V vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import Olmo2ForCausalLM, PreTrainedModel

from ckpt_tools.hf.model import load_hf_model
from tests.conftest import make_hf_directory

VOCABULARY, LENGTH, BATCH = 2048, 128, 8
TRAIN_STEPS, POOL = 200, 256


def text(count: int, seed: int) -> Tensor:
    """Sequences of a Markov chain over words of Zipf's frequencies; how often it is left differs
    by sequence.
    """
    world, generator = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    zipf_V, likely = 1 / torch.arange(1.0, VOCABULARY + 1), 1 / torch.arange(1.0, 9)
    successors_V8 = torch.multinomial(
        zipf_V, VOCABULARY * 8, replacement=True, generator=world
    ).view(-1, 8)

    def words() -> Tensor:
        return torch.multinomial(zipf_V, count, replacement=True, generator=generator)

    order_N, tokens = torch.rand(count, generator=generator), [words()]
    for _ in range(LENGTH):
        chosen_N = torch.multinomial(likely, count, replacement=True, generator=generator)
        follows_N = torch.rand(count, generator=generator) < order_N
        tokens.append(torch.where(follows_N, successors_V8[tokens[-1], chosen_N], words()))
    return torch.stack(tokens, 1)


def mean_loss(model: PreTrainedModel, tokens_NS1: Tensor) -> Tensor:
    """By transformers."""
    logits_NSV = model(tokens_NS1[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits_NSV.flatten(0, 1), tokens_NS1[:, 1:].flatten())


def prepare(place: Path) -> None:
    """The trained model, and the text that stands for all text."""
    shape: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 4,
        "max_position_embeddings": LENGTH,
    }
    make_hf_directory(place / "untrained", vocab_size=VOCABULARY, **shape)
    torch.manual_seed(0)
    model = Olmo2ForCausalLM(load(place / "untrained", "sdpa").config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95))
    for step, tokens_NS1 in enumerate(text(TRAIN_STEPS * BATCH, seed=1).split(BATCH)):
        optimizer.param_groups[0]["lr"] = (
            3e-3 * min(1, (step + 1) / 20) * (1 - 0.9 * step / TRAIN_STEPS)
        )
        optimizer.zero_grad()
        mean_loss(model, tokens_NS1).backward()
        optimizer.step()
    model.save_pretrained(place / "model")
    save_file({"tokens": text(POOL, seed=2)}, place / "pool.safetensors")


def load(directory: Path, attention: str) -> PreTrainedModel:
    return load_hf_model(directory, torch.float32, attention=attention)
