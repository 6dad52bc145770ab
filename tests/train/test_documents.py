"""Attention that stays inside documents, against transformers' model run on each document alone."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import Olmo2ForCausalLM

from base.errors import UserError
from tests.conftest import make_hf_directory
from tests.runs import make_run, on_ranks
from tests.train.plain import figures_of
from train.data.batches import Batch
from train.distributed import start
from train.engines import build_engine
from train.model.documents import attention_in_documents, document_bounds
from train.observing import forward_figures
from train.run.config import load_run, with_settings

LENGTH, END = 32, 0


def batch() -> Batch:
    """Return 8 sequences whose documents end with END: one token long, whole, the last of all."""
    generator = torch.Generator().manual_seed(5)
    tokens_BS = torch.randint(1, 320, (8, LENGTH + 1), generator=generator)
    tokens_BS[torch.rand(tokens_BS.shape, generator=generator) < 0.1] = END
    tokens_BS[0, [0, 1, 31]] = END
    tokens_BS[1] = 7
    counted_BS = torch.rand(8, LENGTH, generator=generator) < 0.9
    starts_BS = torch.ones(8, LENGTH, dtype=torch.bool)
    starts_BS[:, 1:] = tokens_BS[:, :-2] == END
    return Batch(tokens_BS, counted_BS, starts_BS)


def logits_of_documents(model, whole: Batch) -> Tensor:
    """Return logits [B, S, V]: the model sees one document at a time, from position 0."""
    assert whole.starts_BS is not None
    rows = []
    for inputs, starts in zip(whole.tokens_BS[:, :-1], whole.starts_BS, strict=True):
        bounds = [*torch.nonzero(starts).flatten().tolist(), LENGTH]
        lengths = [stop - start for start, stop in pairwise(bounds)]
        parts = [model(part[None]).logits[0] for part in inputs.split(lengths)]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def figures(run_dir: str, hf_dir: str, out: str) -> None:
    """Worker, on every rank: the engine's figures of one update and of a held-out loss."""
    run = load_run(Path(run_dir) / "run.json")
    engine = build_engine(run, start())
    engine.start_from(load_file(Path(hf_dir) / "model.safetensors").__getitem__)
    share = batch().of_replica(engine.replica)
    seen = engine.train_step(share, 1.0, lambda _: False)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(seen.figures | {"held_out": engine.evaluate(share)}))
    else:
        engine.evaluate(share)
    check_observed_figures(engine)
    if run.engine == "megatron":
        check_transformer_engines_format()
    else:
        longer = with_settings(run, ["data.sequence_length=1025"])
        with pytest.raises(UserError, match="set engine to 'megatron'"):
            build_engine(longer, torch.device("cuda"))
    engine.close()


def check_observed_figures(engine) -> None:
    """Four documents in a sequence have the figures of four sequences."""
    tokens_BS, starts_BS = batch().tokens_BS[:, :LENGTH], torch.zeros(8, LENGTH, dtype=torch.bool)
    starts_BS[:, ::8] = True
    apart = Batch.of(F.pad(tokens_BS.reshape(32, 8), (0, 1)))
    together = Batch.of(F.pad(tokens_BS, (0, 1)))._replace(starts_BS=starts_BS)
    figures = forward_figures(engine, together)
    assert any(key.startswith("attention_logit_max") for key in figures)
    assert figures == pytest.approx(forward_figures(engine, apart), rel=1e-5)


def check_transformer_engines_format() -> None:
    """Its attention is given [T, N, D] and bounds, and returns [T, N x D]."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from train.megatron.transformer_engine import with_documents

    class Attention(torch.nn.Module):
        def forward(self, query_TND, key, value, mask, packed_seq_params):
            assert mask is None
            assert packed_seq_params.qkv_format == "thd"
            bounds = packed_seq_params.cu_seqlens_q
            assert packed_seq_params.max_seqlen_q == bounds.diff().max()
            document = torch.bucketize(torch.arange(len(query_TND)), bounds, right=True)
            same = (document[:, None] == document[None]).tril()
            scores = torch.einsum("tnd,snd->nts", query_TND, key) / query_TND.shape[-1] ** 0.5
            weights = scores.masked_fill(~same, -torch.inf).softmax(-1)
            return torch.einsum("nts,snd->tnd", weights, value).flatten(1)

    starts_BS = batch().starts_BS
    assert starts_BS is not None
    bounds = document_bounds(starts_BS)
    longest = int(bounds.diff().max())
    documents = PackedSeqParams("sbhd", bounds, bounds, None, None, longest, longest)
    query, key, value = torch.randn(3, LENGTH, 8, 2, 4, generator=torch.Generator().manual_seed(1))
    ours = attention_in_documents(query, key, value, bounds, longest)
    theirs = with_documents(Attention)()(query, key, value, None, packed_seq_params=documents)
    torch.testing.assert_close(theirs, ours)


@pytest.mark.parametrize(
    "settings",
    [{"pipeline": 2}, {"tensor": 2, "sequence": True}, {"engine": "deepspeed"}],
    ids=["pp2", "sp2", "deepspeed"],
)
def test_documents_are_trained_on_as_if_alone(tmp_path, inputs, settings):
    data = {"document_mask": True}
    make_run(tmp_path / "run", **inputs, data=data, layers=4, kv_heads=2, **settings)
    hf_dir = make_hf_directory(tmp_path / "hf", num_hidden_layers=4, num_key_value_heads=2)
    on_ranks(2, figures, tmp_path / "run", hf_dir, tmp_path / "figures.json")
    seen = json.loads((tmp_path / "figures.json").read_text())

    model, whole = Olmo2ForCausalLM.from_pretrained(hf_dir, attn_implementation="eager"), batch()
    logits = logits_of_documents(model, whole)
    expected = figures_of(model, logits, whole)
    assert seen["counted_fraction"] == expected["counted_fraction"]
    assert seen["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert seen["held_out"] == pytest.approx(seen["loss"], rel=1e-6)
    assert seen["z_loss"] == pytest.approx(expected["z_loss"], rel=1e-5)
    assert seen["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    with torch.no_grad():
        apart = logits - model(whole.tokens_BS[:, :-1]).logits
    assert apart.abs().max() > 0.1, "the mask would change nothing"
