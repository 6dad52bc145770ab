"""Attention that stays within a document, against HF with the mask written out, at one rank and at TP x PP."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import make_hf_directory
from tests.runs import make_run, ranks
from train import layout
from train.config import load_run

LENGTHS = [[32], [5, 27], [1, 1, 30], [16, 16], [31, 1], [2, 3, 4, 5, 6, 12], [10, 10, 12], [20, 12]]


def sequences() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [8, 33]; which labels count [8, 32]: none that begins a document; the document of every input [8, 32]."""
    tokens_BS = torch.randint(0, 320, (8, 33), generator=torch.Generator().manual_seed(11))
    documents_BS = torch.stack(
        [torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) for lengths in LENGTHS]
    )
    counted_BS = torch.ones(8, 32, dtype=torch.bool)
    counted_BS[:, :-1] = documents_BS[:, 1:] == documents_BS[:, :-1]
    return tokens_BS, counted_BS, documents_BS


def differentiate(run_dir: str, hf_dir: str, out: str) -> None:
    """Worker, on every rank: losses and gradients of one masked batch on HF weights."""
    import torch.distributed as dist

    from tests.train.test_gradients import load_weights
    from train.distributed import start
    from train.engine import Batch
    from train.megatron.engine import MegatronEngine

    engine = MegatronEngine(load_run(Path(run_dir) / "run.json"), start())
    parameters = load_weights(engine, hf_dir)
    held_out = engine.evaluate(Batch(*sequences()))
    seen = engine.train_step(Batch(*sequences()), 1.0, lambda _: False)
    gradients = {name: parameter.main_grad.clone() for name, parameter in parameters.items()}
    torch.save((gradients, seen.loss, held_out), Path(out) / f"{dist.get_rank()}.pt")
    engine.close()


@pytest.mark.parametrize("processes", [1, 4])
def test_attention_within_documents_equals_hf_with_the_mask_written_out(tmp_path, inputs, processes):
    settings: dict[str, Any] = {} if processes == 1 else {"tensor": 2, "pipeline": 2, "recompute": "layers"}
    run = make_run(tmp_path / "run", **inputs, **settings)
    masked = run.data.model_copy(update={"document_masking": True})
    make_run(tmp_path / "run", **inputs, **settings, data=masked)
    hf_dir = make_hf_directory(tmp_path / "hf", num_hidden_layers=4)
    arguments = (str(tmp_path / "run"), str(hf_dir), str(tmp_path))
    done = ranks(processes, "tests.train.test_masks", *arguments)
    assert done.returncode == 0, done.stderr[-3000:]

    from transformers import Olmo2ForCausalLM

    model = Olmo2ForCausalLM.from_pretrained(hf_dir, attn_implementation="eager")
    tokens_BS, counted_BS, documents_BS = sequences()
    bias_B1SS = torch.full((8, 1, 32, 32), torch.finfo(torch.float32).min)
    for sequence, documents in enumerate(documents_BS.tolist()):
        for query in range(32):
            for key in range(query + 1):
                if documents[key] == documents[query]:
                    bias_B1SS[sequence, 0, query, key] = 0
    logits = model(tokens_BS[:, :-1], attention_mask=bias_B1SS).logits
    loss_BS = F.cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten(), reduction="none").view(8, 32)
    z_loss_BS = 1e-5 * logits.logsumexp(-1).square()
    ((loss_BS + z_loss_BS)[counted_BS].sum() / counted_BS.numel()).backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    crossing = F.cross_entropy(model(tokens_BS[:, :-1]).logits[counted_BS], tokens_BS[:, 1:][counted_BS]).item()

    tensor, compared = settings.get("tensor", 1), set()
    for rank in range(processes):
        found, loss, held_out = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        expected = loss_BS[counted_BS].mean().item()
        assert abs(expected - crossing) > 1e-2  # the mask matters
        assert loss == pytest.approx(expected, abs=1e-6 * expected)
        assert held_out == pytest.approx(expected, abs=1e-6 * expected)
        for name, gradient in found.items():
            part = layout.shard(name, layout.from_hf(name, gradients.__getitem__, run.model), rank % tensor, tensor)
            assert (gradient - part).norm() < 1e-5 * part.norm(), (name, rank)
            compared.add(name)
    assert compared == set(layout.megatron_names(4))


if __name__ == "__main__":
    differentiate(*sys.argv[1:])
