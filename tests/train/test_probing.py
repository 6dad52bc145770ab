"""The outputs of an engine's modules against transformers' model with the exported weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ckpt_tools.export import export
from tests.conftest import layouts
from tests.probes import largest_error, plain_probe
from tests.runs import draw_weights, on_ranks
from train.distributed import start
from train.run.config import load_run

LAYER = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    *("post_attention_layernorm", "post_feedforward_layernorm"),
)
LAYOUTS = (
    *("dp1", "dp2", "tp2", "pp2", "tp2pp2", "tp2dp2", "sp2", "recompute", "gqa-dp1", "gqa-tp2"),
    *("ds-zero1", "bf16-dp1", "bf16-sp2", "bf16-tp2pp2"),
)


def exported_model(checkpoint: Path, out: Path) -> Any:
    """Transformers' model of a checkpoint, computing in fp32."""
    export(checkpoint, out)
    return AutoModelForCausalLM.from_pretrained(
        out, attn_implementation="eager", dtype=torch.float32
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
