"""`python -m quant_eval run` end to end, and every way to give it something it must refuse."""

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from base.files import sha256_of
from quant_eval.__main__ import app
from quant_eval.measuring.statistics import UNITS
from tests.conftest import make_hf_directory
from tests.digests import blake3_of
from tests.published import change_config, change_weights
from tests.quant_eval.models import token_file
from tests.runs import execute, python


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
        errors = measured["standard_errors"].values()
        assert all(each["documents"] > 0 and each["draws"] is None for each in errors)
        assert measured["interval"]["samples"] == 1000
        assert len(measured["layers"]) == 14
        for name, (low, high) in measured["intervals"].items():
            assert low <= measured[name] <= high
    assert list(results[0].iterdir()) == [results[0] / "result.json"]


def test_figures_follow_from_the_documents(results):
    for directory in results:
        measured = read(directory)["measured"]
        names = ("tokens", "nll", "nll_quantized", "kl")
        arrays = [np.array(measured["per_document"][name]) for name in names]
        tokens, nll, quantized, kl = (values_D.sum() for values_D in arrays)
        assert (measured["tokens"], measured["documents"]) == (tokens, 30)
        expected = {
            "cross_entropy": nll / tokens,
            "cross_entropy_quantized": quantized / tokens,
            "relative_error": quantized / nll - 1,
            "absolute_error": (quantized - nll) / tokens,
            "kl_divergence": kl / tokens,
        }
        assert {name: measured[name] for name in expected} == pytest.approx(expected)


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


def with_weight(hf_dir, directory, name, value):
    """A copy of an HF directory in which one element of one weight is replaced."""
    shutil.copytree(hf_dir, directory)
    weight = load_file(directory / "model.safetensors")[name]
    weight.view(-1)[0] = value
    change_weights(directory, **{name: weight})
    return directory


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
        ("quip-b3-g16", {}, "unknown spec 'quip-b3-g16'; for example gptq-b3-g128"),
        ("gptq-b3-g64", {}, "64 does not divide the 32 input features"),
        ("gptq-b3-g16", {"calibration_sequences": 100_000}, "lower --calibration-sequences"),
        ("gptq-b3-g16", {"calibration": "/nowhere/train"}, "/nowhere/train.json does not exist"),
        ("gptq-b3-g16", {"eval_tokens": 4000}, "raise --eval-tokens"),
        ("rtn-b3-g16", {"dtype": "other"}, "--dtype"),
        ("rtn-b3-g16", {"documents": "other"}, "--documents"),
        ("rtn-b3-g16", {"device": "other"}, "--device"),
    ],
)
def test_bad_settings_are_refused(command, tmp_path, spec, options, reason):
    assert_refused(command("--spec", spec, "--out", tmp_path / "out", **options), tmp_path, reason)


def test_what_is_there_is_kept_and_printed(command, printed, monkeypatch, tmp_path, hf_dir):
    """The same model, spec and settings are not measured twice; any other are."""
    model = shutil.copytree(hf_dir, tmp_path / "model")
    path = model / "quant/rtn-b3-g16/result.json"

    def run(**options):
        assert command("--spec", "rtn-b3-g16", model=model, **options)[0] == 0
        return list(printed)

    first = run()
    assert first[-1] == f"written: {path}"
    measured = read(path.parent)["measured"]
    assert first[1] == f"{model}: loss {measured['cross_entropy']:.4f} in full precision"
    row = first[4].split()
    assert row[:2] == ["rtn-b3-g16", f"{measured['cross_entropy_quantized']:.4f}"]
    assert float(row[5]) == pytest.approx(1000 * measured["kl_divergence"], rel=0.01)
    content = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("quant_eval.measuring.measurement.measure", None)  # would fail
        kept = run()
    assert kept == [*first[:-1], f"kept, measured before: {path}"]
    assert path.read_bytes() == content
    assert "kept, measured" in run(calibration="/not/read")[-1]
    assert "kept, measured" not in run(eval_tokens=5500)[-1]
    assert "kept, measured" not in run()[-1]  # the last one was of other settings
    with_weight(hf_dir, tmp_path / "other", "model.norm.weight", 0.5)
    shutil.copy(tmp_path / "other/model.safetensors", model / "model.safetensors")
    assert "kept, measured" not in run()[-1]
    path.write_text(path.read_text()[:-100])  # damaged
    assert "kept, measured" not in run()[-1]


def test_the_seed_of_random_signs_is_that_asked_for(command, printed, tmp_path):
    """They decide the losses of specs that read no calibration text, too."""

    def run(name, seed):
        given = ("--spec", "rtn-b4-g16-rhad", "--out", tmp_path / name)
        assert command(*given, seed=seed)[0] == 0
        return read(tmp_path / name)["measured"]

    first, second = run("a", 1), run("a", 2)
    assert "kept, measured" not in printed[-1]
    assert second == run("b", 2)
    assert second["kl_divergence"] != first["kl_divergence"]
    assert (first["interval"]["seed"], second["interval"]["seed"]) == (1, 2)
    run("a", 2)
    assert "kept, measured" in printed[-1]


def test_asking_for_more_measures_again(command, printed, tmp_path):
    out = ("--spec", "gptq-b3-g16", "--out", tmp_path / "out")
    for number, options in enumerate([(), ("--dense",), ("--dense",), ("--per-block",)]):
        assert command(*out, *options)[0] == 0
        assert ("kept, measured" in printed[-1]) == (number == 2)
    assert command(*out, "--dense")[0] == 0
    assert "kept, measured" not in printed[-1]  # the result without them replaced theirs
    assert command(*out, calibration_sequences=20)[0] == 0
    assert "kept, measured" not in printed[-1]


WITHOUT_SLOW_IMPORTS = """
import runpy, sys
for name in ("torch", "transformers", "scipy"):
    sys.modules[name] = None  # importing it fails
runpy.run_module("quant_eval", run_name="__main__")
"""


def run_without_slow_imports(*words):
    return execute([sys.executable, "-c", WITHOUT_SLOW_IMPORTS, *map(str, words)])


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


def test_results_lie_beside_their_models_by_default(command, tmp_path, hf_dir):
    """Several HF directories in one process give what each gives alone."""
    first = shutil.copytree(hf_dir, tmp_path / "one")
    second = make_hf_directory(tmp_path / "two", seed=5)
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
    assert_refused(command("--spec", "rtn-b3-g16", *outs), tmp_path, "2 --out for 1 result(s)")
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
    up, head = "model.layers.0.mlp.up_proj.weight", "lm_head.weight"

    for model, reason in [
        (models / "absent", "does not exist"),
        (truncated, "damaged"),
        (other, "holds a GPT2LMHeadModel"),
        (wider, "the model needs (80, 32)"),
        (small, "outside the model's vocabulary of 50"),
        (with_weight(hf_dir, models / "nan", up, float("nan")), f"'{up}' holds values that"),
        (with_weight(hf_dir, models / "inf", head, float("inf")), f"'{head}' holds values that"),
        # the outputs of up overflow
        (with_weight(hf_dir, models / "large", up, 3e38), "model.layers.0.mlp.down_proj"),
    ]:
        outcome = command("--spec", "gptq-b3-g16", "--out", tmp_path / "out", model=model)
        assert_refused(outcome, tmp_path, reason)


@pytest.fixture(scope="module")
def short_prefix(tmp_path_factory, tokenizer_dir):
    """A token file of a few tokens."""
    return token_file(tmp_path_factory.mktemp("short") / "short", ["abc"], tokenizer_dir)


def test_a_corpus_shorter_than_one_sequence_is_refused(command, tmp_path, short_prefix):
    words = ("--spec", "gptq-b3-g16", "--out", tmp_path / "out")
    short = command(*words, calibration=short_prefix)
    assert_refused(short, tmp_path, "fewer than one sequence")
    short = command(*words, eval=short_prefix)
    assert_refused(short, tmp_path, "1 evaluated documents or blocks give no")
