"""The command, end to end and with bad input."""

import json

import numpy as np
import pytest
import torch
from transformers import Olmo2ForCausalLM

import curvature.olmo2
from curvature.__main__ import app
from curvature.dual import rms_norm
from tests.conftest import make_hf_directory
from train.command import run_command
from train.corpus import open_corpus
from train.data import batch

SMALL = ["--pairs", "4", "--sequence-length", "24", "--eigen-sequences", "3", "--max-iterations", "30", "--seed", "5"]


def curvature_command(monkeypatch, *arguments) -> int:
    monkeypatch.setattr("sys.argv", ["curvature", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        run_command(app, "curvature")
    return int(ended.value.code or 0)


@pytest.fixture
def measured(monkeypatch, tmp_path, train_prefix):
    """Runs the command in small and returns result.json."""

    def run(model, *options, name="out"):
        out = tmp_path / name / "hutchinson"
        arguments = ("--spec", "hutchinson", "--data", train_prefix, "--out", out, *SMALL, *options)
        assert curvature_command(monkeypatch, "run", model, *arguments) == 0
        assert [path.name for path in out.iterdir()] == ["result.json"]
        return json.loads((out / "result.json").read_text())

    return run


def test_result_holds_numbers_with_their_conditions(measured, hf_dir, train_prefix):
    result = measured(hf_dir)
    assert list(result) == ["model", "spec", "measured", "environment"]
    spec, values = result["spec"], result["measured"]
    assert (spec["name"], spec["pairs"], spec["seed"], spec["sequence_length"]) == ("hutchinson", 4, 5, 24)
    assert spec["data"]["bin_sha256"] == open_corpus(train_prefix).manifest.bin.sha256
    assert result["model"]["path"] == str(hf_dir)
    assert values["trace"]["probes"] == len(values["trace"]["per_pair"]) == 4
    assert values["trace"]["mean"] == pytest.approx(sum(block["mean"] for block in values["block_traces"].values()))
    assert values["parameters"] == sum(block["parameters"] for block in values["block_traces"].values())
    assert values["lambda_max"]["converged"] is True
    assert values["lambda_max"]["residual"] <= spec["tolerance"]
    assert values["guard"]["product_relative_difference"] < 1e-3


def test_loss_is_hfs_own_on_the_first_batches_of_the_seed(measured, hf_dir, train_prefix):
    corpus, model = open_corpus(train_prefix), Olmo2ForCausalLM.from_pretrained(hf_dir)
    losses = []
    for step in range(1, 5):
        tokens = torch.from_numpy(batch(corpus, step=step, batch_size=2, sequence_length=24, seed=5))
        losses.append(model(tokens, labels=tokens).loss.item())
    assert measured(hf_dir)["measured"]["loss"] == pytest.approx(sum(losses) / 4, rel=1e-6)


def test_both_routes_agree(measured, hf_dir):
    """To the accuracy of finite differences."""
    dual = measured(hf_dir, name="dual")["measured"]
    differences = measured(hf_dir, "--route", "finite-difference", name="differences")["measured"]
    assert differences["trace"]["per_pair"] == pytest.approx(dual["trace"]["per_pair"], rel=2e-3)
    assert differences["lambda_max"]["value"] == pytest.approx(dual["lambda_max"]["value"], rel=1e-3)
    assert differences["loss"] == pytest.approx(dual["loss"], rel=1e-6)


def test_repeating_and_checkpointing_change_nothing(measured, hf_dir):
    first, second = measured(hf_dir, name="first"), measured(hf_dir, name="second")
    assert first["measured"] == second["measured"]
    thrifty = measured(hf_dir, "--checkpointing", name="thrifty")
    assert thrifty["spec"]["checkpointing"] is True
    assert thrifty["measured"]["trace"]["per_pair"] == pytest.approx(first["measured"]["trace"]["per_pair"], rel=1e-5)


@pytest.mark.parametrize("route", ["dual", "finite-difference"])
def test_the_padding_token_is_a_token_like_others(measured, tmp_path, hf_dir, train_prefix, route):
    """HF drops the gradient of its embedding row: with a frequent token as padding, trace and guard would notice."""
    tokens = batch(open_corpus(train_prefix), step=1, batch_size=2, sequence_length=24, seed=5)
    frequent = int(np.bincount(tokens[:, :-1].ravel()).argmax())
    padded = measured(make_hf_directory(tmp_path / "padded", pad_token_id=frequent), "--route", route, name="padded")
    plain = measured(hf_dir, "--route", route, name="plain")
    assert padded["measured"]["trace"]["per_pair"] == pytest.approx(plain["measured"]["trace"]["per_pair"], rel=1e-6)


def test_a_microbatch_size_that_does_not_divide_the_fixed_batch(measured, hf_dir):
    """Three sequences in microbatches of two and one, or of three: the same mean loss, hence the same Hessian."""
    two, three = (measured(hf_dir, "--microbatch-sequences", size, name=f"m{size}") for size in (2, 3))
    assert two["measured"]["lambda_max"]["value"] == pytest.approx(three["measured"]["lambda_max"]["value"], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--spec", "slice"], "--spec 'slice' is unknown"),
        (["--pairs", "1"], "'pairs'"),
        (["--route", "guess"], "'route'"),
        (["--route", "finite-difference", "--checkpointing"], "belongs to --route dual; leave it out"),
        (["--tolerance", "nan"], "'tolerance'"),
        (["--max-iterations", "1"], "'max_iterations'"),
        (["--sequence-length", "65"], "beyond the model's context 64"),
        (["--pairs", "100000"], "sequences of 24 tokens, 200000 are needed"),
        (["--data", "nowhere/at-all"], "does not exist; make it with"),
    ],
)
def test_bad_options_end_with_one_line_and_nothing_written(
    monkeypatch, capsys, tmp_path, hf_dir, train_prefix, options, message
):
    out = tmp_path / "out"
    arguments = ["--spec", "hutchinson", "--data", train_prefix, "--out", out, *SMALL, *options]
    assert curvature_command(monkeypatch, "run", hf_dir, *arguments) == 2
    lines = capsys.readouterr().err.split("\n")[:-1]
    lines = [line for line in lines if "Loading weights" not in line]  # transformers' own bar
    assert len(lines) == 1
    assert message in lines[0]
    assert not out.exists()


def refused(monkeypatch, capsys, tmp_path, model, train_prefix) -> str:
    out = tmp_path / "out"
    arguments = ("--spec", "hutchinson", "--data", train_prefix, "--out", out, *SMALL)
    assert curvature_command(monkeypatch, "run", model, *arguments) == 2
    assert not out.exists()
    return str(capsys.readouterr().err.splitlines()[-1])


def test_bad_models_are_refused(monkeypatch, capsys, tmp_path, train_prefix):
    def refusal(model) -> str:
        return refused(monkeypatch, capsys, tmp_path, model, train_prefix)

    assert "does not exist" in refusal(tmp_path / "nothing")
    assert "outside the model's vocabulary of 16" in refusal(make_hf_directory(tmp_path / "small", vocab_size=16))
    other = make_hf_directory(tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]}
    (other / "config.json").write_text(json.dumps(config))
    assert "holds a LlamaForCausalLM" in refusal(other)
    broken = make_hf_directory(tmp_path / "broken")
    model = Olmo2ForCausalLM.from_pretrained(broken)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(broken)
    assert "not finite" in refusal(broken)


def test_a_refusing_guard_writes_nothing(monkeypatch, capsys, tmp_path, hf_dir, train_prefix):
    monkeypatch.setattr(curvature.olmo2, "rms_norm", lambda x, weight, epsilon: rms_norm(x, weight, 0.1))
    assert "refusing to measure" in refused(monkeypatch, capsys, tmp_path, hf_dir, train_prefix)


def test_results_lie_beside_their_models_by_default(monkeypatch, capsys, tmp_path, train_prefix):
    models = [make_hf_directory(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    arguments = ("--spec", "hutchinson", "--data", train_prefix, *SMALL)
    assert curvature_command(monkeypatch, "run", *models, *arguments) == 0
    first, second = (json.loads((model / "curvature/hutchinson/result.json").read_text()) for model in models)
    assert first["measured"]["trace"] != second["measured"]["trace"]
    assert first["measured"]["loss"] > 0
    assert curvature_command(monkeypatch, "run", *models, *arguments, "--out", tmp_path / "out") == 2
    assert "leave it out for several" in capsys.readouterr().err


def test_more_than_one_process_is_refused(monkeypatch, capsys, tmp_path, hf_dir, train_prefix):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "without torchrun" in refused(monkeypatch, capsys, tmp_path, hf_dir, train_prefix)
