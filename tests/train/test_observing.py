"""Figures of layers against transformers' model with the exported weights, and against torch."""

import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb

from ckpt_tools.export import export
from train.data.corpus import open_corpus
from train.forward_record import largest_logit
from train.run.config import load_run
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics


def figures_of(model: Any, tokens_BS: torch.Tensor) -> dict[str, float]:
    """The figures of a model's weights and of its forward pass, written out."""
    squares: dict[str, float] = {}
    for name, weight in model.named_parameters():
        parts = name.removeprefix("model.").split(".")
        part = f"layers.{parts[1]}" if parts[0] == "layers" else parts[0]
        squares[part] = squares.get(part, 0.0) + weight.double().square().sum().item()
    figures = {f"weight_norm/{part}": math.sqrt(square) for part, square in squares.items()}
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(("q_norm", "k_norm", "rotary_emb")) or name.count(".") == 2:
            module.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
    with torch.no_grad():
        model(tokens_BS)
    cos, sin = seen["model.rotary_emb"]
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    length = tokens_BS.shape[1]
    for layer in range(2):
        residual = seen[f"model.layers.{layer}"].double()
        figures[f"residual_rms/layers.{layer}"] = residual.square().mean().sqrt().item()
        query, key = (
            seen[f"model.layers.{layer}.self_attn.{part}_norm"]
            .unflatten(-1, (-1, head_dim))
            .transpose(1, 2)
            for part in "qk"
        )
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        logits = query @ key.transpose(2, 3) / math.sqrt(head_dim)
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        figures[f"attention_logit_max/layers.{layer}"] = logits[..., allowed].max().item()
    return figures


@pytest.mark.parametrize("layout", ["tp2pp2", "gqa-tp2", "sp2", "ds-zero1"])
def test_figures_are_those_of_the_exported_model(trained, tmp_path, layout):
    directory = RunDirectory(trained(layout))
    run = load_run(directory.run_json)
    export(directory.checkpoint(20), tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    tokens_BS = torch.tensor(open_corpus(run.data.held_out).tokens_T[:64].astype("int64"))
    row = {row["step"]: row for row in read_metrics(directory.metrics)}[20]
    expected = figures_of(model, tokens_BS.view(2, 32))
    assert len(expected) == 3 + 3 * 2
    assert {key: row[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    # The anneal ends at a learning rate of zero.
    assert all(value == 0 for key, value in row.items() if key.startswith("update_norm"))


@pytest.mark.parametrize("layout", ["dp2", "tp2pp2", "sp2", "ds-zero1", "bf16-dp2"])
def test_norms_of_gradients_make_up_the_whole_and_agree(trained, layout):
    def row_of(name: str) -> dict[str, float]:
        rows = read_metrics(RunDirectory(trained(name)).metrics)
        return {row["step"]: row for row in rows}[10]

    row, expected = row_of(layout), row_of("dp1")
    gradients = [value for key, value in row.items() if key.startswith("gradient_norm/")]
    assert len(gradients) == 2 + 3
    assert math.hypot(*gradients) == pytest.approx(row["grad_norm"], rel=1e-5)
    kinds = ("weight_norm/", "gradient_norm/", "update_norm/", "residual", "attention")
    figures = {key: value for key, value in expected.items() if key.startswith(kinds)}
    assert figures.keys() <= row.keys()
    if "bf16" not in layout:
        assert {key: row[key] for key in figures} == pytest.approx(figures, rel=1e-3)


def test_the_largest_logit_in_pieces_is_that_of_the_whole():
    """A key after its query would give a larger one."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 4, 50, 8, generator=generator)
    key = torch.randn(2, 2, 50, 8, generator=generator)
    key[:, :, 49] *= 20
    key[:, :, 49] *= torch.sign((query[:, ::2, :1] * key[:, :, 49:]).sum(-1))
    whole = -math.inf
    for b in range(2):
        for n in range(4):
            for q in range(50):
                for k in range(q + 1):
                    whole = max(whole, (query[b, n, q] @ key[b, n // 2, k]).item() / math.sqrt(8))
    assert largest_logit(query, key, None, queries_at_once=16) == pytest.approx(whole, rel=1e-6)
    # Its own document has one query that sees this key.
    key[:, :, 10] *= 40
    documents = (torch.arange(50) > 10).long().expand(2, -1)
    parts = slice(11), slice(11, 50)
    alone = max(largest_logit(query[:, :, part], key[:, :, part], None) for part in parts)
    assert largest_logit(query, key, None) > 1.1 * alone
    assert largest_logit(query, key, documents, queries_at_once=16) == pytest.approx(alone)
