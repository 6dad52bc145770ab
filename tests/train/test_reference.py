"""The engine against OLMo2 in transformers, trained by torch's own AdamW in a plain loop."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Olmo2Config, Olmo2ForCausalLM

from tests.ckpt_tools.checkpoints import read_shards
from train.data.batches import batch
from train.data.corpus import open_corpus
from train.model.initialization import initial_parameter
from train.run.config import load_run
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics


def plain_model(run) -> Olmo2ForCausalLM:
    model = Olmo2ForCausalLM(
        Olmo2Config(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=run.model.num_hidden_layers,
            num_attention_heads=4,
            num_key_value_heads=run.model.num_key_value_heads,
            max_position_embeddings=32,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=0,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(initial_parameter(name, run.model, run.seed))
    return model


def norms_by_part(values: dict[str, torch.Tensor]) -> dict[str, float]:
    """L2 norms over the layers, the embedding, the last norm and the head."""
    parts = {f"layers.{index}": f"model.layers.{index}." for index in range(2)}
    parts |= {"embed_tokens": "model.embed", "norm": "model.norm", "lm_head": "lm_head"}
    return {
        part: torch.cat([v.flatten() for n, v in values.items() if n.startswith(start)])
        .norm()
        .item()
        for part, start in parts.items()
    }


def rate_by_hand(step: int) -> float:
    """Warm-up over 4 steps to 1e-2, cosine to a tenth at 100, from 15 straight to zero at 20."""

    def cosine(at):
        return 1e-3 + 9e-3 * (1 + math.cos(math.pi * (at - 4) / 96)) / 2

    if step < 4:
        return 1e-2 * step / 4
    return cosine(step) if step <= 15 else cosine(15) * (20 - step) / 5


def differentiate(model: Any, tokens_BS: Tensor) -> float:
    """Set the clipped gradients of cross-entropy and z-loss; return the former before the update."""
    logits = model(tokens_BS[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten())
    model.zero_grad()
    (loss + 1e-5 * logits.logsumexp(-1).square().mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss.item()


def test_twenty_steps_equal_plain_torch(trained):
    """Initialisation, data, schedule, z-loss, clipping, decay groups and AdamW, all at once."""
    directory = RunDirectory(trained("dp1"))
    run = load_run(directory.run_json)
    corpus = open_corpus(run.data.train)
    model = plain_model(run)
    decayed = [weight for name, weight in model.named_parameters() if "embed_tokens" not in name]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [model.model.embed_tokens.weight], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    rows = {row["step"]: row for row in read_metrics(directory.metrics)}
    named = dict(model.named_parameters())
    for step in range(1, 21):
        tokens = torch.from_numpy(
            batch(corpus, step=step, batch_size=8, sequence_length=32, seed=run.seed)
        )
        logits = model(tokens[:, :-1]).logits
        cross_entropy = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        )
        z_loss = 1e-5 * logits.logsumexp(-1).square().mean()
        optimizer.zero_grad()
        (cross_entropy + z_loss).backward()
        gradients = norms_by_part({n: w.grad for n, w in named.items() if w.grad is not None})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = {name: weight.detach().clone() for name, weight in named.items()}
        for group in optimizer.param_groups:
            group["lr"] = rate_by_hand(step)
        optimizer.step()
        if step == 10:
            moves = {name: weight.detach() - before[name] for name, weight in named.items()}
            for kind, norms in (("gradient", gradients), ("update", norms_by_part(moves))):
                logged = {part: rows[step][f"{kind}_norm/{part}"] for part in norms}
                assert logged == pytest.approx(norms, rel=1e-3)
        assert rows[step]["learning_rate"] == pytest.approx(rate_by_hand(step), rel=1e-12)
        assert rows[step]["loss"] == pytest.approx(cross_entropy.item(), abs=1e-4)
        assert rows[step]["z_loss"] == pytest.approx(z_loss.item(), rel=1e-3)
        assert rows[step]["grad_norm"] == pytest.approx(norm.item(), rel=1e-2)
    final = read_shards(directory.checkpoint(20), run.model)
    assert final.keys() == dict(model.named_parameters()).keys()
    for name, weight in model.named_parameters():
        # AdamW moves weights by their gradient's sign at first: rounding noise in a gradient near
        # zero is amplified
        moved = (weight - initial_parameter(name, run.model, run.seed)).norm()
        assert (final[name] - weight).norm() < 2e-3 * moved, name
