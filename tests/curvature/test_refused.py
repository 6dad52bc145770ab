"""Refusals: one line, exit code 2, nothing written; and where results go otherwise."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Olmo2ForCausalLM

from curvature.cost import memory
from curvature.dual import blocks
from curvature.dual.elementwise import rms_norm
from tests.conftest import make_hf_directory
from tests.curvature.conftest import command
from tests.sealing import reseal

SMALL = ["--sequence-length", "16", "--fixed-sequences", "2", "--max-iterations", "3"]
PAIRS = ["--pairs", "2", "--norm-pairs", "2", "--companion-pairs", "2"]


@pytest.fixture
def refusal(capsys, tmp_path, held_out_prefix):
    """The one line of a refused measurement."""

    def run(model: Path, *options, spec="hutchinson", data=held_out_prefix) -> str:
        out = tmp_path / "refused"
        of_spec = PAIRS if spec == "hutchinson" else []
        before = sorted(model.rglob("*"))
        capsys.readouterr()
        assert command(spec, model, "--data", data, "--out", out, *SMALL, *of_spec, *options) == 2
        assert not out.exists()
        assert sorted(model.rglob("*")) == before
        lines = capsys.readouterr().err.splitlines()
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
        assert "Traceback" not in "".join(lines)
        return str(lines[-1])

    return run


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("hutchinson", "--pairs 0", "'pairs'"),
        ("hutchinson", "--pairs -4", "'pairs'"),
        ("hutchinson", "--pairs 100000", "of 16 tokens, 200000 are needed; give more text"),
        ("hutchinson", "--norm-pairs 1", "'norm_pairs'"),
        ("hutchinson", "--companion-pairs 1", "'companion_pairs'"),
        ("hutchinson", "--tolerance nan", "'tolerance'"),
        ("hutchinson", "--max-iterations 1", "'max_iterations'"),
        ("hutchinson", "--max-iterations 999999999", "41,248 entries .* lower --max-iterations"),
        ("hutchinson", "--microbatch-sequences 0", "'microbatch_sequences'"),
        ("hutchinson", "--sequence-length 65", "beyond the model's context 64"),
        ("hutchinson", "--seed -1", "'seed'"),
        ("hutchinson", "--data nowhere/at-all", "does not exist; make it with"),
        ("hutchinson", "--dry-run b9000", "--dry-run b9000 names no GPUs; give a kind"),
        ("lanczos", "--largest 0", "'largest'"),
        ("lanczos", "--largest 9 --max-iterations 8", "give --max-iterations 12 or ask for fewer"),
    ],
)
def test_bad_options(refusal, hf_dir, spec, options, message):
    line = refusal(hf_dir, *options.split(), spec=spec)
    assert re.search(message, line), line


@pytest.mark.parametrize("option", ["--sharding", "--device", "--vectors", "--dtype", "--products"])
def test_words_and_options_that_are_unknown(hf_dir, capsys, held_out_prefix, option):
    assert command("hutchinson", hf_dir, "--data", held_out_prefix, option, "some") == 2
    assert option in capsys.readouterr().err


def test_bad_models(refusal, tmp_path):
    assert "does not exist; give an HF directory" in refusal(tmp_path / "nothing")
    assert "outside the model's vocabulary of 16" in refusal(
        make_hf_directory(tmp_path / "small", vocab_size=16)
    )
    model = make_hf_directory(tmp_path / "model")
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").unlink()
    assert "holds no safetensors weights; give a complete HF directory" in refusal(model)
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors is damaged" in refusal(model)
    (model / "model.safetensors").write_bytes(weights)
    lineage: dict[str, Any] = {"kind": "export", "files": {}, "parity": None}
    reseal(model / "lineage.json", lineage)
    assert "was not proven to compute what its training engine did" in refusal(model)
    lineage |= {
        "parity": {"largest_difference": 1e-6},
        "files": {"model.safetensors": {"bytes": 1, "digest": "blake3:" + "ab" * 32}},
    }
    reseal(model / "lineage.json", lineage)
    assert "; export the checkpoint again" in refusal(model)
    (model / "lineage.json").write_text('{"kind": "exp')
    assert "lineage.json is not valid JSON (" in refusal(model)
    other = make_hf_directory(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps(config | {"architectures": ["BertModel"], "model_type": "bert"})
    )
    assert "architecture bert is not known; give one of olmo2, " in refusal(other)
    (other / "config.json").write_text(json.dumps(config)[:-9])
    assert "is not valid JSON" in refusal(other)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_losses_that_are_not_finite(refusal, tmp_path, value):
    model = make_hf_directory(tmp_path / "model")
    broken = Olmo2ForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.lm_head.weight[0] = value
    broken.save_pretrained(model)
    assert "; check the checkpoint's weights for overflow" in refusal(model)


def test_text_that_is_not_what_was_prepared(refusal, tmp_path, hf_dir, held_out_prefix):
    for suffix in ("bin", "idx", "json"):
        shutil.copy(f"{held_out_prefix}.{suffix}", tmp_path / f"text.{suffix}")
    tokens = bytearray((tmp_path / "text.bin").read_bytes())
    tokens[8:10] = tokens[6:8]
    (tmp_path / "text.bin").write_bytes(tokens)
    assert "text.bin was changed after it was prepared" in refusal(hf_dir, data=tmp_path / "text")
    (tmp_path / "text.bin").write_bytes(tokens[:-100])
    assert "text.bin is missing or truncated" in refusal(hf_dir, data=tmp_path / "text")
    (tmp_path / "text.json").write_text("")
    assert "is not valid JSON" in refusal(hf_dir, data=tmp_path / "text")


def test_a_product_that_differs_from_finite_differences(refusal, monkeypatch, hf_dir):
    monkeypatch.setattr(blocks, "rms_norm", lambda x, weight, _, *to: rms_norm(x, weight, 0.1, *to))
    assert "refusing to measure" in refusal(hf_dir)


def test_results_lie_beside_their_models_and_nowhere_else(capsys, tmp_path, held_out_prefix):
    models = [
        make_hf_directory(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))
    ]
    arguments = ("--data", held_out_prefix, *SMALL, *PAIRS)
    assert command("hutchinson", *models, *arguments, "--dry-run", "2xh100") == 0
    assert ": fits: " in capsys.readouterr().out
    assert not (models[0] / "curvature").exists()
    assert command("hutchinson", *models, *arguments) == 0
    first, second = (
        json.loads((model / "curvature/hutchinson/result.json").read_text()) for model in models
    )
    assert first["measured"]["trace"] != second["measured"]["trace"]
    assert [path.name for path in (models[0] / "curvature/hutchinson").iterdir()] == ["result.json"]
    assert command("hutchinson", *models, *arguments, "--out", tmp_path / "out") == 2
    assert "leave it out for several" in capsys.readouterr().err
    assert command("hutchinson", models[0], models[0], *arguments) == 2
    assert command("hutchinson", models[0], *arguments, "--out", models[0] / "config.json") == 2


def test_steps(capsys, tmp_path, family, held_out_prefix, monkeypatch):
    """Every refusal leaves both results as they were."""
    base, result = family.base, family.quantized
    before = (result / "result.json").read_bytes()

    def refused(model, directory, *options) -> str:
        given = ["--quantized", directory, "--data", held_out_prefix, "--sequence-length", 16]
        assert command("step", model, *given, *options) == 2
        assert (result / "result.json").read_bytes() == before
        assert not (base / "curvature").exists()
        return str(capsys.readouterr().err.splitlines()[-1])

    other = make_hf_directory(tmp_path / "other", seed=1)
    assert f"is of another model than {other}; give the one that was quantized" in refused(
        other, result
    )
    assert "result.json does not exist; measure it" in refused(base, tmp_path)
    assert "would be lost; give another --out" in refused(base, result, "--out", result)
    assert "'microbatches'" in refused(base, result, "--microbatches", "1")
    with monkeypatch.context() as patch:  # room for weights and tangents of 41,248 entries
        patch.setattr(memory, "free_memory", lambda: 400_000)
        line = refused(base, result)
    assert re.search("2 vectors of 41,248 entries, 3 vectors of 20,480 .* give more memory", line)
    bare = tmp_path / "rtn-b3-g16"
    shutil.copytree(result, bare)
    shutil.rmtree(bare / "dense")
    assert "holds no dequantized weights; measure it with" in refused(base, bare)
    given = ["--quantized", result, "--data", held_out_prefix, "--microbatches", 2]
    assert command("step", base, *given) == 0
    (written,) = (base / "curvature/step-rtn-b3-g16").iterdir()
    assert written.name == "result.json"
