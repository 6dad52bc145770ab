"""The command line as a user meets it."""

import json
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import AutoConfig

from base.errors import UserError
from ckpt_tools.hf.forward import empty_model
from quant_eval.measuring.sequential import check_spec
from quant_eval.specs import parse_spec
from study.measurements.sizes import misfits
from study.recipes.resolve import resolve
from tests.runs import python
from tests.study.ablation import tiny
from tests.study.synthetic import write_study
from train.model.config import ModelConfig, hf_settings
from train.model.families import family_of
from train.run.config import RunConfig


def study_command(*arguments: str) -> CompletedProcess:
    return python("study", *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "tinny"], "no recipe 'tinny'; did you mean tiny"),
        (["run", "tiny", "--profile", "huge"], "no profile 'huge'; take one of full, smoke"),
        (["run", "tiny", "--text", "absent.jsonl", "more.jsonl"], "absent.jsonl does not exist"),
        (["run", "tiny", "--set", "engin=deepspeed"], "no such setting"),
        (
            ["show", "tiny", "--set", "save_steps=[640]"],
            "save_steps must be in 0..1024 and end with",
        ),
        (
            ["show", "tiny", "--set", "model.family=llama"],
            "the megatron engine trains olmo2, not llama",
        ),
        (["status", "../tiny", "--root", "runs"], "cannot be the name of a study"),
        (["run", "$(touch x)"], "cannot be the name of a study"),
        (["status", "absent", "--root", "/nonexistent"], "does not exist"),
        (["collect", "tiny", "--root", "/nonexistent"], "does not exist"),
        (["report", "tiny", "--root", "/nonexistent"], "does not exist"),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2(arguments, words):
    done = study_command(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


def test_list_show_and_status(study_dir, study):
    assert "tiny (full, smoke)" in study_command("list").stdout
    shown = study_command("show", "tiny", "--profile", "smoke").stdout
    assert "python -m quant_eval run" in shown
    assert "lr3e-2: peak 0.03" in shown
    assert "methods rtn-b3-g32, int8-t6" in shown
    assert "by_block gptq-b3-g32" in shown
    assert "averages quantized: lawa5x4 at 72" in shown
    assert "soup-anneal: the mean of the checkpoints at 48, 72, quantized" in shown
    status = study_command("status", "tiny", "--root", str(study_dir.parent))
    # results alone do not make a step complete: nothing says which command left them
    assert "train      0/4  next: train-lr1e-3: waits for prepare-train" in status.stdout
    assert "corpus     0/1  next: corpus: not run yet" in status.stdout
    assert f"0/227 steps complete in {study_dir}" in status.stdout


def test_a_set_study_has_a_name_and_a_directory_of_its_own(tmp_path):
    setting = ["--set", "engine=deepspeed", "--set", "zero.stage=2"]
    shown = study_command("show", "tiny", *setting).stdout
    assert shown.startswith("tiny-engine=deepspeed-stage=2: ")
    assert "lr2.4e-2-seed3: peak 0.024" in shown
    assert "python -m train run" in shown
    changed = resolve("tiny", "full", ("engine=deepspeed", "zero.stage=2"))
    directory = write_study(tmp_path / changed.name, changed)
    name = study_command("collect", changed.name, "--root", str(tmp_path))
    assert name.stdout.startswith(f"{directory / 'table.parquet'}: 48 rows"), name.stderr
    # without the settings it is another study; by the name of its directory it is found as it is
    assert "does not exist" in study_command("status", "tiny", "--root", str(tmp_path)).stderr
    assert (
        f"steps complete in {directory}"
        in study_command("status", changed.name, "--root", str(tmp_path)).stdout
    )


def test_a_used_name_is_refused_before_anything_runs(tmp_path):
    study = resolve("tiny", "full")
    directory = write_study(tmp_path / study.name, study)
    path = directory / study.trained[-1].name / "run.json"
    content = json.loads(path.read_text()) | {"seed": 12345}
    del content["fingerprint"]
    path.write_text(json.dumps(content))
    done = study_command("run", "tiny", "--root", str(tmp_path))
    assert done.returncode == 2
    assert study.trained[-1].name in done.stderr
    assert not (directory / "logs").exists()


SPECS = (
    *("gptq-b3-g48", "rtn-b3-g32", "gptq-b3-perchannel", "qtip-b2", "nf4-g64", "autoround-b4-g16"),
    *("rtn-b4-g16-amxfp4", "mxfp4", "nvfp4", "w4a4-g16", "rtn-b4-g16-had", "rtn-b4-g16-had32"),
    *("w4a4-g16-quarot", "w4a4-g16-quarot-fused", "w4a4-g16-duquant", "w4a4-g16-duquant48"),
    *("rtn-b4-g16-kv4-quarot", "none-kv4-quarot", "w4a4-g16-spinquant-blockwise"),
)
SIZES: dict[str, dict[str, Any]] = {
    "olmo2": {"family": "olmo2", "hidden_size": 96, "intermediate_size": 288},
    "odd": {"family": "olmo2", "hidden_size": 80, "intermediate_size": 208},
    "llama": {"family": "llama", "hidden_size": 64, "intermediate_size": 112},
    "gpt_neox": {
        **{"family": "gpt_neox", "hidden_size": 64, "intermediate_size": 256},
        **{"rotary_fraction": 0.25, "initializer": "normal"},
    },
}


def model(sizes: dict[str, Any]) -> ModelConfig:
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return ModelConfig(vocab_size=320, num_hidden_layers=2, **heads, **sizes)


def run_of(sizes: dict[str, Any]) -> RunConfig:
    return tiny().trained[0].model_copy(update={"model": model(sizes)})


def refused_of_study(run: RunConfig, spec: str) -> str:
    return next(misfits(run, (spec,), {}), "").partition(f"spec {spec}: ")[2]


def without_weights(model: ModelConfig) -> Any:
    """The model as transformers builds it, as far as specs are checked against it."""
    config = AutoConfig.for_model(model.family, **hf_settings(model, 64, 0))
    linears = {
        name: module
        for name, module in empty_model(config).named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name
    }
    return SimpleNamespace(config=config, family=family_of(config), empty_linears=lambda: linears)


def refused_of_model(run: RunConfig, spec: str) -> str:
    """The reason that quant_eval gives."""
    try:
        check_spec(without_weights(run.model), parse_spec(spec))
    except UserError as error:
        return str(error).partition(f"spec {spec}: ")[2]
    return ""


@pytest.mark.parametrize("name", SIZES)
def test_a_study_refuses_what_the_measurement_would(name):
    run = run_of(SIZES[name])
    reasons = {spec: refused_of_study(run, spec) for spec in SPECS}
    assert reasons == {spec: refused_of_model(run, spec) for spec in SPECS}
    assert any(reasons.values())
    assert not all(reasons.values())
