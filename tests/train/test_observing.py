"""Figures of layers and outputs of modules, against transformers' model with the exported weights."""

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb

from ckpt_tools.export import export
from tests.conftest import layouts
from tests.plain_outliers import linears_of, plain_figures, plain_inputs, plain_weight
from tests.probes import largest_error, plain_probe
from tests.runs import draw_weights, on_ranks
from train.data.corpus import open_corpus
from train.distributed import start
from train.forward_record import largest_logit
from train.run.config import load_run
from train.run.directory import RunDirectory
from train.run.metrics import read_metrics


def exported_model(checkpoint: Path, out: Path) -> Any:
    """Transformers' model of a checkpoint, computing in fp32."""
    export(checkpoint, out)
    return AutoModelForCausalLM.from_pretrained(
        out, attn_implementation="eager", dtype=torch.float32
    )


def outliers_of(model: Any, tokens_BS: torch.Tensor) -> dict[str, float]:
    """The outlier statistics of every linear of the layers, and their means over linears."""
    inputs, figures, by_figure = plain_inputs(model, tokens_BS), {}, defaultdict(list)
    for name, linear in linears_of(model).items():
        for figure, value in plain_figures(inputs[name], plain_weight(linear)).items():
            figures[f"outliers/{figure}/{name.removeprefix('model.')}"] = value
            by_figure[f"outliers/{figure}"].append(value)
    return figures | {figure: float(np.mean(values)) for figure, values in by_figure.items()}


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
    model = exported_model(directory.checkpoint(20), tmp_path / "hf")
    tokens_BS = torch.tensor(open_corpus(run.data.held_out).tokens_T[:64].astype("int64"))
    row = {row["step"]: row for row in read_metrics(directory.metrics)}[20]
    expected = figures_of(model, tokens_BS.view(2, 32))
    assert len(expected) == 3 + 3 * 2
    expected |= outliers_of(model, tokens_BS.view(2, 32))
    assert len(expected) == 3 + 3 * 2 + 8 * (2 * 7 + 1)
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
    kinds = ("weight_norm/", "gradient_norm/", "update_norm/", "residual", "attention", "outliers/")
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


LAYER = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    *("post_attention_layernorm", "post_feedforward_layernorm"),
)
LAYOUTS = (
    *("dp1", "dp2", "tp2", "pp2", "tp2pp2", "tp2dp2", "sp2", "recompute", "gqa-dp1", "gqa-tp2"),
    *("ds-zero1", "bf16-dp1", "bf16-sp2", "bf16-tp2pp2"),
)


@pytest.mark.parametrize("layout", layouts(*LAYOUTS))
def test_every_module_puts_out_what_it_does_in_transformers(trained, tmp_path, layout):
    """fp32: sums in another order. bf16: four layers round activations to 8 bits of mantissa."""
    checkpoint = trained(layout) / "checkpoints" / "step00000020"
    probe = load_file(checkpoint / "probe.safetensors")
    input_ids = probe.pop("input_ids")
    outside = {"logits", "outputs/model.embed_tokens", "outputs/model.norm"}
    inside = {
        f"outputs/model.layers.{layer}{name}"
        for layer in range(2)
        for name in ("", *(f".{n}" for n in LAYER))
    }
    assert probe.keys() == outside | inside
    model = exported_model(checkpoint, tmp_path / "hf")
    bound = 2e-2 if "bf16" in layout else 3e-6
    assert largest_error(probe, plain_probe(model, input_ids)) < bound


def probe_shorter(run_dir: str, out: str) -> None:
    """Worker, on every rank: probes sequences of lengths that do not divide over the ranks."""
    from train.megatron.engine import MegatronEngine

    run = load_run(Path(run_dir) / "run.json")
    engine = MegatronEngine(run, start())
    draw_weights(engine, run)
    modules = list(engine._pipeline.model.modules())
    for length in (7, 20):
        probe = engine.probe(torch.arange(2 * length).view(2, length))
        if dist.get_rank() == 0:
            save_file(probe, Path(out) / f"{length}.safetensors")
        else:
            assert probe == {}
    assert not any(module._forward_hooks for module in modules)
    engine.close()


def test_padding_and_the_rank_of_the_last_token_do_not_matter(trained, tmp_path):
    """Under sequence parallelism 7 tokens are padded to 8; no hook stays behind."""
    on_ranks(2, probe_shorter, trained("sp2"), tmp_path)
    model = exported_model(trained("sp2") / "checkpoints" / "step00000000", tmp_path / "hf")
    for length in (7, 20):
        expected = plain_probe(model, torch.arange(2 * length).view(2, length))
        assert largest_error(load_file(tmp_path / f"{length}.safetensors"), expected) < 3e-6
