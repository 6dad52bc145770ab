"""Runs from an imported model, by both engines, against transformers in a plain loop."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from base.files import sha256_of
from ckpt_tools.export import export
from ckpt_tools.formats.megatron_shards import ShardedTensors
from ckpt_tools.importing import import_checkpoint
from tests.ckpt_tools.checkpoints import read_weights, seal
from tests.ckpt_tools.test_import import LLAMA3
from tests.conftest import LAYOUTS, layouts, make_hf_directory
from tests.quant_eval.models import make_model
from tests.runs import make_run, ranks, refusal, succeed
from tests.train.plain import adamw, differentiate, update
from tests.train.trajectories import flip_a_byte
from train.data.batches import batch
from train.data.corpus import open_corpus
from train.data.prepare import prepare
from train.model.config import ModelConfig
from train.model.megatron_names import hf_rows, megatron_names
from train.run.config import StartFrom, load_run
from train.run.directory import CHECKPOINT_JSON, PROBE, RunDirectory, read_checkpoint_record
from train.run.metrics import read_metrics
from train.run.optimization import Anneal, ConstantPhase, ScheduleConfig

STEPS, RATE = 4, 1e-3


@pytest.fixture(scope="module")
def source(tmp_path_factory, tokenizer_dir) -> Path:
    """A random OLMo2 of `make_run`'s sizes, as an HF directory with the tests' tokenizer."""
    directory = make_hf_directory(tmp_path_factory.mktemp("source") / "model")
    for path in tokenizer_dir.iterdir():
        shutil.copy(path, directory / path.name)
    return directory


@pytest.fixture(scope="module")
def imported(tmp_path_factory, source) -> Path:
    """The checkpoint that is imported from it; tests that change it copy it."""
    checkpoint = tmp_path_factory.mktemp("imported") / "checkpoint"
    import_checkpoint(str(source), checkpoint)
    return checkpoint


def start_run(directory: Path, checkpoint: Path, inputs: dict[str, Path], **changes):
    """A short anneal of an imported model: the rate falls straight from its first step."""
    settings: dict[str, Any] = {
        "start_from": StartFrom(
            checkpoint=str(checkpoint), sha256=sha256_of(checkpoint / CHECKPOINT_JSON)
        ),
        "schedule": ScheduleConfig(
            warmup_tokens=0, phase=ConstantPhase(), anneal=Anneal(start_step=0)
        ),
        "peak_lr": RATE,
        "total_steps": STEPS,
        "save_steps": (0, STEPS),
        "evaluate_every_steps": STEPS,
    }
    return make_run(directory, **(settings | inputs | changes))


def losses_by_hand(source: Path, run_dir: Path) -> list[float]:
    """Cross-entropy before every update of transformers' model, trained by torch's AdamW."""
    return train_by_hand(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), run_dir)


def train_by_hand(model: Any, run_dir: Path) -> list[float]:
    run = load_run(run_dir / "run.json")
    optimizer = adamw(dict(model.named_parameters()))
    corpus, losses = open_corpus(run.data.train), []
    for step in range(1, STEPS + 1):
        tokens = torch.from_numpy(
            batch(corpus, step=step, batch_size=8, sequence_length=32, seed=3)
        )
        losses.append(differentiate(model, tokens))
        update(optimizer, RATE * (1 - step / STEPS))
    return losses


@pytest.mark.parametrize("layout", layouts("dp1", "tp2", "tp2dp2", "pp2", "ds-zero1"))
def test_training_starts_from_the_imported_weights_with_a_fresh_optimizer(
    tmp_path, source, imported, inputs, layout
):
    processes, settings = LAYOUTS[layout]
    start_run(tmp_path / "run", imported, inputs, **settings)
    succeed(ranks(processes, "train", "run", str(tmp_path / "run")))
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    first = read_weights(RunDirectory(tmp_path / "run").checkpoint(0))
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], expected[name]) for name in first)
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    losses = losses_by_hand(source, tmp_path / "run")
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "layout"), [("olmo2", "pp2"), ("qwen2", "sp2"), ("llama-tied", "ds-zero1")]
)
def test_a_tied_model_is_imported_trained_and_exported(
    tmp_path, tokenizer_dir, inputs, name, layout
):
    """Its loss continues where transformers has it, and transformers loads what was trained.

    The head may be in the files a second time. A Llama has the rotary scaling of Llama 3.
    """
    changes: dict[str, Any] = {"tie_word_embeddings": True, "num_hidden_layers": 2}
    if name == "llama-tied":
        changes["rope_parameters"] = LLAMA3
    source = make_model(tmp_path / "source", name, **changes)
    for path in tokenizer_dir.iterdir():
        shutil.copy(path, source / path.name)
    weights = load_file(source / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    copies = weights | {"lm_head.weight": embedding.clone()}
    save_file(copies, source / "model.safetensors", {"format": "pt"})
    import_checkpoint(str(source), tmp_path / "start")
    assert load_file(tmp_path / "start" / "model.safetensors").keys() == weights.keys()

    processes, settings = LAYOUTS[layout]
    model = ModelConfig.model_validate(read_checkpoint_record(tmp_path / "start").model)
    run_dir = tmp_path / "run"
    start_run(run_dir, tmp_path / "start", inputs, model=model, **settings)
    succeed(ranks(processes, "train", "run", str(run_dir)))

    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    expected = train_by_hand(plain, run_dir)
    losses = [row["loss"] for row in read_metrics(run_dir / "metrics.jsonl") if "loss" in row]
    assert losses == pytest.approx(expected, abs=1e-5)
    checkpoint = RunDirectory(run_dir).checkpoint(STEPS)
    assert read_weights(checkpoint).keys() == weights.keys()
    export(checkpoint, tmp_path / "hf")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    probe = load_file(checkpoint / PROBE)
    with torch.no_grad():
        logits, by_hand = (each(probe["input_ids"]).logits for each in (exported, plain))
    torch.testing.assert_close(logits, probe["logits"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, by_hand, atol=1e-4, rtol=1e-4)


def test_main_weights_keep_fp32_where_the_model_computes_in_bf16(
    tmp_path, source, imported, inputs
):
    short: dict[str, Any] = {"total_steps": 1, "save_steps": (0, 1)}
    start_run(tmp_path / "run", imported, inputs, precision="bf16", **short)
    succeed(ranks(2, "train", "run", str(tmp_path / "run")))
    first = RunDirectory(tmp_path / "run").checkpoint(0)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).state_dict()
    stored, model = ShardedTensors(first), load_run(tmp_path / "run" / "run.json").model
    for name in megatron_names(model):
        key = f"optimizer.state.param.{name}"
        main = stored.read(key, 0, stored.tensors[key].shape[0])
        for hf_name, spans in hf_rows(name, model).items():
            rows = torch.cat([main[start:stop] for start, stop in spans])
            assert torch.equal(rows, expected[hf_name]), hf_name
    computed = read_weights(first)
    assert all(torch.equal(computed[name], expected[name].bfloat16()) for name in computed)


def test_what_does_not_fit_is_refused(tmp_path, imported, inputs):
    checkpoint = Path(shutil.copytree(imported, tmp_path / "imported"))

    def refused(name: str, **changes: Any) -> str:
        start_run(tmp_path / name, checkpoint, inputs, **changes)
        line = refusal(tmp_path / name)
        assert not list(tmp_path.glob(f"{name}/checkpoints/*"))
        return line

    assert "model.num_key_value_heads is 2 in run.json, 4 in" in refused("grouped", kv_heads=2)
    other = StartFrom(checkpoint=str(checkpoint), sha256="0" * 64)
    assert "has another SHA-256 than start_from names" in refused("other", start_from=other)
    nowhere = StartFrom(checkpoint="../nowhere", sha256="0" * 64)
    assert "start_from names no checkpoint" in refused("nowhere", start_from=nowhere)
    weights = (checkpoint / "model.safetensors").read_bytes()
    flip_a_byte(checkpoint / "model.safetensors")
    assert "was changed after it was written" in refused("damaged")
    (checkpoint / "model.safetensors").write_bytes(weights)
    # The imported probe is transformers': another one stands for a wrong conversion.
    probe = load_file(checkpoint / "probe.safetensors")
    save_file({**probe, "logits": probe["logits"] * 1.001}, checkpoint / "probe.safetensors")
    seal(checkpoint)
    assert "the engine's logits differ" in refused("otherwise")
    seal(checkpoint, imported=None)
    assert "was not imported" in refused("own")


def test_another_tokenizer_is_refused(tmp_path, imported, tokenizer_dir):
    other = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_dir, other)
    content = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(content + "\n")
    for split, letters in (("train", range(97, 123)), ("held_out", range(122, 96, -1))):
        (tmp_path / f"{split}.txt").write_text("".join(map(chr, letters)) * 200)
        prepare([tmp_path / f"{split}.txt"], other, tmp_path / split)
    prefixes = {
        "train_prefix": tmp_path / "train",
        "held_out_prefix": tmp_path / "held_out",
        "tokenizer_dir": other,
    }
    start_run(tmp_path / "run", imported, prefixes)
    assert "is not the tokenizer of" in refusal(tmp_path / "run")
