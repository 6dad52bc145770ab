"""`python -m quant_eval run` end to end, and every way to give it something it must refuse."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from base.files import sha256_of
from quant_eval.__main__ import app
from quant_eval.measuring.statistics import UNITS
from quant_eval.settings import CalibrationSettings
from quant_eval.specs import parse_spec
from quant_eval.tasks.measurement import quantized_model
from tests.conftest import make_hf_directory
from tests.digests import blake3_of
from tests.published import change_config, change_weights
from tests.quant_eval.models import mean_loss
from tests.runs import python
from train.data.corpus import open_corpus
from train.data.prepare import prepare


@pytest.fixture
def printed():
    """Lines of stdout of the last command."""
    return []


@pytest.fixture
def command(in_process, hf_dir, train_prefix, held_out_prefix, printed):
    """Runs the command in this process with small defaults; returns its exit code and lines of
    stderr.
    """

    def run(*arguments, model=hf_dir, **options):
        defaults = {
            "calibration": train_prefix,
            "eval": held_out_prefix,
            "calibration-sequences": 24,
            "eval-tokens": 5000,
        }
        given = defaults | {name.replace("_", "-"): value for name, value in options.items()}
        pairs = [part for name, value in given.items() for part in (f"--{name}", value)]
        words = ("run", model, *arguments, *pairs)
        code, printed[:], errors = in_process(app, "quant_eval", *words)
        return code, errors

    return run


def read(directory):
    return json.loads((directory / "result.json").read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory, hf_dir, train_prefix, held_out_prefix):
    """Two specs in one run of the real command, in a process of its own."""
    root = tmp_path_factory.mktemp("results")
    command = ["quant_eval", "run", hf_dir, "--calibration", train_prefix]
    command += ["--eval", held_out_prefix, "--calibration-sequences", "24"]
    command += ["--spec", "gptq-b3-g16", "--out", root / "a/gptq"]
    command += ["--spec", "rtn-b3-g16", "--out", root / "rtn"]
    hashes = {path.name: sha256_of(path) for path in hf_dir.iterdir()}
    done = python(*map(str, command))
    assert done.returncode == 0, done.stderr
    assert hashes == {path.name: sha256_of(path) for path in hf_dir.iterdir()}
    return root / "a/gptq", root / "rtn"


def test_a_result_is_complete(results, hf_dir, held_out_prefix):
    gptq, rtn = read(results[0]), read(results[1])
    assert gptq.keys() == {"model", "spec", "measured", "environment", "sha256"}
    assert gptq["model"]["weights_digests"] == {
        "model.safetensors": blake3_of(hf_dir / "model.safetensors")
    }
    assert [result["spec"]["name"] for result in (gptq, rtn)] == ["gptq-b3-g16", "rtn-b3-g16"]
    assert gptq["spec"]["calibration"]["sequences"] == 24
    assert gptq["spec"]["calibration"]["sequence_length"] == 64  # the model's context
    assert gptq["spec"]["evaluation"]["sha256"] == sha256_of(Path(f"{held_out_prefix}.bin"))
    for measured in (gptq["measured"], rtn["measured"]):
        assert measured.keys() == UNITS.keys() | {"intervals", "interval", "units"}
        structured = ("layers", "per_document", "calibration", "standard_errors")
        assert all(
            isinstance(measured[name], int | float) for name in UNITS if name not in structured
        )
        assert measured["calibration"] is None
        for errors in measured["standard_errors"].values():
            assert errors["documents"] > 0
            assert errors["draws"] is None
        assert measured["interval"]["samples"] == 1000
        assert len(measured["layers"]) == 14
        for name, (low, high) in measured["intervals"].items():
            assert low <= measured[name] <= high
    assert list(results[0].iterdir()) == [results[0] / "result.json"]


def test_figures_follow_from_the_documents(results):
    for directory in results:
        measured = read(directory)["measured"]
        tokens, nll, nll_quantized, kl = (
            np.array(measured["per_document"][name])
            for name in ("tokens", "nll", "nll_quantized", "kl")
        )
        assert measured["tokens"] == tokens.sum()
        assert measured["documents"] == len(tokens) == 30
        assert measured["cross_entropy"] == pytest.approx(nll.sum() / tokens.sum())
        assert measured["cross_entropy_quantized"] == pytest.approx(
            nll_quantized.sum() / tokens.sum()
        )
        assert measured["relative_error"] == pytest.approx(nll_quantized.sum() / nll.sum() - 1)
        assert measured["absolute_error"] == pytest.approx(
            (nll_quantized.sum() - nll.sum()) / tokens.sum()
        )
        assert measured["kl_divergence"] == pytest.approx(kl.sum() / tokens.sum())


def test_gptq_stays_nearer_to_the_model_than_rounding(results):
    gptq, rtn = (read(directory)["measured"] for directory in results)
    assert gptq["cross_entropy"] == rtn["cross_entropy"]  # one full-precision evaluation
    assert 0 < gptq["kl_divergence"] < rtn["kl_divergence"]
    assert gptq["top1_agreement"] > rtn["top1_agreement"]


def test_a_spec_alone_gives_what_it_gives_in_company(results, command, tmp_path):
    code, _ = command("--spec", "rtn-b3-g16", "--out", tmp_path / "alone", eval_tokens=10**6)
    assert code == 0
    assert read(tmp_path / "alone")["measured"] == read(results[1])["measured"]


def test_eight_bits_cost_next_to_nothing_in_both_dtypes(command, tmp_path):
    full = {}
    for dtype in ("fp32", "bf16"):
        out = tmp_path / dtype
        assert command("--spec", "gptq-b8-g16", "--out", out, dtype=dtype)[0] == 0
        result = read(out)
        assert result["spec"]["dtype"] == dtype
        assert abs(result["measured"]["relative_error"]) < 2e-3
        full[dtype] = result["measured"]["cross_entropy"]
    assert full["bf16"] == pytest.approx(full["fp32"], rel=5e-3)
    assert full["bf16"] != full["fp32"]


def assert_refused(outcome, directory, reason):
    """Exit code 2, one line that says why (after plain progress lines), and nothing left behind."""
    code, lines = outcome
    errors = [line for line in lines if line.startswith("error: ")]
    assert code == 2
    assert len(errors) == 1
    assert lines[-1] == errors[0]
    assert reason in errors[0]
    assert all(line.startswith(("error: ", "quantize ", "losses ")) for line in lines)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        ("gptq-b3", {}, "needs a group size or perchannel"),
        ("quip-b3-g16", {}, "unknown spec 'quip-b3-g16'; for example gptq-b3-g128"),
        ("awq-b3-g16-actorder", {}, "awq does not take order"),
        ("gptq-b3-g64", {}, "64 does not divide the 32 input features"),
        ("gptq-b3-g16", {"calibration_sequences": 100_000}, "lower --calibration-sequences"),
        ("gptq-b3-g16", {"calibration": "/nowhere/train"}, "/nowhere/train.json does not exist"),
        ("gptq-b3-g16", {"eval": "/nowhere/eval"}, "/nowhere/eval.json does not exist"),
        ("gptq-b3-g16", {"eval_tokens": 4000}, "raise --eval-tokens"),
        ("gptq-b3-g16", {"calibration_seeds": 0}, "seeds"),
    ],
)
def test_bad_settings_are_refused(command, tmp_path, spec, options, reason):
    assert_refused(command("--spec", spec, "--out", tmp_path / "out", **options), tmp_path, reason)


@pytest.mark.parametrize("option", ["dtype", "documents", "device"])
def test_what_is_none_of_the_choices_is_refused(command, tmp_path, option):
    code, lines = command("--spec", "rtn-b3-g16", "--out", tmp_path / "out", **{option: "other"})
    assert code == 2
    assert f"--{option}" in lines[-1]
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_kept_and_printed(command, printed, monkeypatch, tmp_path, hf_dir):
    """The same model, spec and settings are not measured twice; any other are."""
    model = shutil.copytree(hf_dir, tmp_path / "model")
    path = model / "quant/rtn-b3-g16/result.json"

    def run(**options):
        assert command("--spec", "rtn-b3-g16", model=model, **options)[0] == 0
        return list(printed)

    first = run()
    assert first[0] == f"rtn-b3-g16 of {model}: measured, {path}"
    result = read(path.parent)
    low, high = result["measured"]["intervals"]["kl_divergence"]
    assert f"KL {result['measured']['kl_divergence']:.4g} [{low:.4g}, {high:.4g}]" in first[1]
    content = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("quant_eval.measuring.measurement.measure", None)  # would fail
        kept = run()
    assert kept == [first[0].replace("measured,", "kept, measured before,"), first[1]]
    assert path.read_bytes() == content
    assert "kept, measured" in run(calibration="/not/read")[0]
    assert "kept, measured" not in run(eval_tokens=5500)[0]
    assert "kept, measured" not in run()[0]  # the last one was of other settings
    with_weight(hf_dir, tmp_path / "other", "model.norm.weight", 0.5)
    shutil.copy(tmp_path / "other/model.safetensors", model / "model.safetensors")
    assert "kept, measured" not in run()[0]
    path.write_text(path.read_text()[:-100])  # damaged
    assert "kept, measured" not in run()[0]


def test_asking_for_more_measures_again(command, printed, tmp_path):
    out = ("--spec", "gptq-b3-g16", "--out", tmp_path / "out")
    for number, options in enumerate([(), ("--dense",), ("--dense",), ("--per-block",)]):
        assert command(*out, *options)[0] == 0
        assert ("kept, measured" in printed[0]) == (number == 2)
    assert command(*out, "--dense")[0] == 0
    assert "kept, measured" not in printed[0]  # the result without them replaced theirs
    assert command(*out, calibration_sequences=20)[0] == 0
    assert "kept, measured" not in printed[0]


WITHOUT_SLOW_IMPORTS = """
import runpy, sys
for name in ("torch", "transformers", "scipy"):
    sys.modules[name] = None  # importing it fails
runpy.run_module("quant_eval", run_name="__main__")
"""


def test_help_and_refusals_import_nothing_slow(hf_dir, train_prefix, held_out_prefix):
    texts = ["--calibration", train_prefix, "--eval", held_out_prefix]
    for model, spec, more, reason in [
        (hf_dir, "gptq", [], "needs its bits"),
        ("/nowhere", "rtn-b3-g16", [], "/nowhere/config.json does not exist"),
        (hf_dir, "rtn-b3-g16", ["--eval", "/nowhere/text"], "/nowhere/text.json does not exist"),
        (hf_dir, "rtn-b3-g16", ["--out", hf_dir / "config.json"], "is a file"),
        (hf_dir, "rtn-b3-g16", ["--calibration-seeds", "0"], "calibration_seeds"),
        (hf_dir, "gptq-b3-g16", None, "gptq-b3-g16 is calibrated on text; give it"),
    ]:
        given = texts[2:] if more is None else [*texts, *more]
        done = run_without_slow_imports("run", model, "--spec", spec, *given)
        assert (done.returncode, reason in done.stderr) == (2, True), done.stderr
    for words in (["run", "--help"], ["tasks", "--help"], ["compare", "--help"], ["methods"]):
        done = run_without_slow_imports(*words)
        assert (done.returncode, done.stderr) == (0, "")


def run_without_slow_imports(*words):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_SLOW_IMPORTS, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parents[2],
    )


def test_results_lie_beside_their_models_by_default(command, tmp_path, hf_dir):
    """Several HF directories in one process give what each gives alone."""
    first, second = (
        shutil.copytree(hf_dir, tmp_path / "one"),
        make_hf_directory(tmp_path / "two", seed=5),
    )
    spec = ("--spec", "rtn-b3-g16-sym")
    assert command(second, *spec, model=first)[0] == 0
    assert command(*spec, "--out", tmp_path / "alone", model=second)[0] == 0
    beside = [read(model / "quant" / "rtn-b3-g16") for model in (first, second)]
    assert beside[0]["measured"] != beside[1]["measured"]
    assert beside[1]["measured"] == read(tmp_path / "alone")["measured"]
    code, lines = command(second, *spec, "--out", tmp_path / "both", model=first)
    assert code == 2
    assert "leave it out for several" in lines[-1]


def test_specs_and_outs_must_pair(command, tmp_path):
    outs = ["--out", tmp_path / "a", "--out", tmp_path / "b"]
    assert_refused(command("--spec", "rtn-b3-g16", *outs), tmp_path, "1 --spec but 2 --out")
    same = ["--spec", "rtn-b3-g16", "--out", tmp_path / "a"]
    assert_refused(command(*same, *same), tmp_path, "same directory")


def test_one_bad_spec_spoils_all(command, tmp_path, hf_dir, tmp_path_factory):
    """The good spec is measured, the second fails on the way, its first Hessian being singular:
    neither is written.
    """
    singular = Path(shutil.copytree(hf_dir, tmp_path_factory.mktemp("singular") / "model"))
    name = "model.embed_tokens.weight"
    embedding = load_file(singular / "model.safetensors")[name]
    embedding[:, 3] = embedding[:, 4]
    change_weights(singular, **{name: embedding})
    specs = ["--spec", "rtn-b3-g16", "--out", tmp_path / "a"]
    specs += ["--spec", "gptq-b3-g16-damp0", "--out", tmp_path / "b"]
    reason = "model.layers.0.self_attn.q_proj: the calibration Hessian"
    assert_refused(command(*specs, model=singular), tmp_path, reason)


def with_weight(hf_dir, directory, name, value):
    """A copy of an HF directory in which one element of one weight is replaced."""
    shutil.copytree(hf_dir, directory)
    weight = load_file(directory / "model.safetensors")[name]
    weight.view(-1)[0] = value
    change_weights(directory, **{name: weight})
    return directory


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (UP, float("nan"), f"'{UP}' holds values that"),
        ("lm_head.weight", float("inf"), "'lm_head.weight' holds values that are not finite"),
        (UP, 3e38, "model.layers.0.mlp.down_proj"),  # the outputs of up overflow
    ],
)
def test_what_is_not_finite_is_refused(
    command, tmp_path, hf_dir, tmp_path_factory, name, value, reason
):
    broken = with_weight(hf_dir, tmp_path_factory.mktemp("broken") / "model", name, value)
    outcome = command("--spec", "gptq-b3-g16", "--out", tmp_path / "out", model=broken)
    assert_refused(outcome, tmp_path, reason)


def test_models_that_cannot_be_measured_are_refused(command, tmp_path, hf_dir, tmp_path_factory):
    models = tmp_path_factory.mktemp("models")

    def copied(name):
        return Path(shutil.copytree(hf_dir, models / name))

    truncated, other, wider = copied("truncated"), copied("other"), copied("wider")
    weights = truncated / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    change_config(other, architectures=["GPT2LMHeadModel"])
    change_config(wider, intermediate_size=80)
    small = make_hf_directory(models / "small", vocab_size=50, eos_token_id=0)

    for model, reason in [
        (models / "absent", "does not exist"),
        (truncated, "damaged"),
        (other, "holds a GPT2LMHeadModel"),
        (wider, "the model needs (80, 32)"),
        (small, "outside the model's vocabulary of 50"),
    ]:
        outcome = command("--spec", "rtn-b3-g16", "--out", tmp_path / "out", model=model)
        assert_refused(outcome, tmp_path, reason)


@pytest.fixture(scope="module")
def short_prefix(tmp_path_factory, tokenizer_dir):
    """A token file of a few tokens."""
    source = tmp_path_factory.mktemp("short") / "short.jsonl"
    source.write_text('{"text": "abc"}\n')
    prepare([source], tokenizer_dir, source.with_suffix(""))
    return source.with_suffix("")


def test_a_corpus_shorter_than_one_sequence_is_refused(command, tmp_path, short_prefix):
    out = ("--spec", "rtn-b3-g16", "--out", tmp_path / "out")
    calibrated = ("--spec", "gptq-b3-g16", "--out", tmp_path / "out")
    short = command(*calibrated, calibration=short_prefix)
    assert_refused(short, tmp_path, "fewer than one sequence")
    assert_refused(
        command(*out, eval=short_prefix), tmp_path, "1 evaluated documents or blocks give no"
    )


def test_losses_are_those_of_the_quantized_model_saved_and_reloaded(
    results, hf_dir, held_out_prefix, train_prefix
):
    """Quantized again, saved and reloaded by transformers, the model gives the recorded loss on
    the first document.
    """
    settings = CalibrationSettings(calibration=train_prefix, calibration_sequences=24)
    saved = results[0].parent / "saved"
    quantized_model(hf_dir, parse_spec("gptq-b3-g16"), settings, ())[0].save_pretrained(saved)
    reloaded = AutoModelForCausalLM.from_pretrained(
        saved, dtype=torch.float32, attn_implementation="eager"
    )
    document_T = open_corpus(held_out_prefix).document(0)
    num_targets = len(document_T) - 1
    blocks = [document_T[start : start + 65] for start in range(0, num_targets, 64)]
    nll = mean_loss(reloaded, blocks) * num_targets
    measured = read(results[0])["measured"]["per_document"]["nll_quantized"][0]
    assert measured == pytest.approx(nll, rel=1e-5)
