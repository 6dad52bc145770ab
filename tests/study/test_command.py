"""The command line as a user meets it: refusals, names, and no wait for heavy libraries."""

import json
import re
import subprocess
import sys
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
from tests.runs import PROJECT, error_line, python
from tests.study.ablation import tiny
from tests.study.commands import printed, refused
from tests.study.synthetic import table_of, write_study
from train.model.config import ModelConfig, hf_settings
from train.model.families import family_of
from train.run.config import RunConfig


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "tinny"], "no recipe 'tinny'; did you mean tiny"),
        (["run", "tiny", "--profile", "huge"], "no profile 'huge'; take one of full, smoke"),
        (["run", "$(touch x)"], "cannot be the name of a study"),
        (["status", "../tiny", "--root", "runs"], "cannot be the name of a study"),
        *(
            ([command, "tiny", "--root", "/nonexistent"], "does not exist")
            for command in ("status", "collect", "report", "mirror")
        ),
    ],
)
def test_bad_input_is_refused(arguments, words):
    assert words in refused(*arguments)


def test_list_show_and_status(study_dir, study):
    listed = printed("list").splitlines()
    assert len(listed) <= 24
    assert max(map(len, listed)) <= 100
    assert listed[1].startswith("tiny")
    assert "tiny (full, smoke): The OLMo2-7B learning-rate ablation" in printed("list", "--all")
    shown = printed("show", "tiny", "--profile", "smoke", "--all")
    assert "python -m quant_eval run" in shown
    assert re.search(r"^lr3e-2 +0.03 ", shown, re.MULTILINE)
    assert "methods rtn-b3-g32, int8-t6" in shown
    assert "by_block gptq-b3-g32" in shown
    assert "averages: lawa5x4 at 72, quantized" in shown
    assert "soup-anneal: soup of steps 48 and 72, quantized" in shown
    status = printed("status", "tiny", "--root", study_dir.parent)
    # results alone do not make a step complete: nothing says which command left them
    assert "train      0/4  next: train-lr1e-3: waits for prepare-train" in status
    assert "corpus     0/1  next: corpus: not run yet" in status
    assert f"0/227 steps complete in {study_dir}" in status


def test_a_set_study_has_a_name_and_a_directory_of_its_own(tmp_path):
    shown = printed("show", "tiny", "--set", "engine=deepspeed", "--set", "zero.stage=2", "--all")
    assert shown.startswith("tiny-engine=deepspeed-stage=2: ")
    assert re.search(r"^lr7.2e-2-seed3 +0.072 ", shown, re.MULTILINE)
    brief = printed("show", "tiny").splitlines()
    assert "each with seeds 1, 2, 3, 4: 16 runs in all" in brief
    assert not any("seed3" in line for line in brief)
    assert "python -m train run" in shown
    changed = resolve("tiny", "full", ("engine=deepspeed", "zero.stage=2"))
    directory = write_study(tmp_path / changed.name, changed)
    collected = printed("collect", changed.name, "--root", tmp_path)
    assert collected.startswith(f"{directory / 'table.parquet'}: 36 rows")
    # without the settings it is another study; by the name of its directory it is found as it is
    assert "does not exist" in refused("status", "tiny", "--root", tmp_path)
    status = printed("status", changed.name, "--root", tmp_path)
    assert f"steps complete in {directory}" in status


def test_a_used_name_is_refused_before_anything_runs(tmp_path):
    study = resolve("tiny", "full")
    directory = write_study(tmp_path / study.name, study)
    path = directory / study.trained[-1].name / "run.json"
    content = json.loads(path.read_text()) | {"seed": 12345}
    del content["fingerprint"]
    path.write_text(json.dumps(content))
    done = python("study", "run", "tiny", "--root", str(tmp_path))
    assert study.trained[-1].name in error_line(done)
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


HEAVY = ("torch", "transformers", "matplotlib", "mlflow", "pandas", "scipy.stats", "scipy")
# What runs a command as `python -m` does, then prints which of the heavy libraries it imported.
CHILD = """
import json, runpy, sys
from contextlib import redirect_stdout, suppress
module, *sys.argv[1:] = sys.argv[1:]
with suppress(SystemExit), redirect_stdout(sys.stderr):
    runpy.run_module(module, run_name="__main__", alter_sys=True)
print(json.dumps([name for name in {heavy} if name in sys.modules]))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two runs of the ablation, with a result of everything."""
    directory = tmp_path_factory.mktemp("light")
    study = tiny()
    study = study.model_copy(update={"runs": study.runs[:2]})
    write_study(directory / "tiny", study)
    table_of(directory / "tiny", study)
    return directory


@pytest.mark.parametrize(
    "command",
    [
        "quant_eval run --help",
        "study list",
        "study status tiny --root {root}",
        "study report tiny --claims --root {root}",
    ],
)
def test_no_heavy_library_is_imported(root, command):
    words = command.format(root=root).split()
    child = [sys.executable, "-c", CHILD.format(heavy=HEAVY), *words]
    done = subprocess.run(child, cwd=PROJECT, capture_output=True, text=True, check=True)
    imported = json.loads(done.stdout)
    if "--claims" in words:
        assert imported == ["scipy"], "Student's distribution, of scipy.special"
        assert "claims" in done.stderr.splitlines()[0]
    else:
        assert imported == []
