"""The engine against OLMo2 in transformers, trained by torch's own AdamW in a plain loop."""

import math

import pytest
import torch

from tests.ckpt_tools.checkpoints import read_shards
from tests.train.plain import adamw, plain_model, update
from train.data.batches import batch
from train.data.corpus import open_corpus
from train.model.initialization import initial_parameter
from train.run.config import load_run
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics


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


def test_twenty_steps_equal_plain_torch(trained):
    """Initialisation, data, schedule, z-loss, clipping, decay groups and AdamW, all at once."""
    directory = RunDirectory(trained("dp1"))
    run = load_run(directory.run_json)
    corpus = open_corpus(run.data.train)
    model = plain_model(run)
    named = dict(model.named_parameters())
    optimizer = adamw(named)
    rows = {row["step"]: row for row in read_metrics(directory.metrics)}
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
        update(optimizer, rate_by_hand(step))
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
