"""The mean that averages made from files are: against exact fractions, numpy and torch."""

import json
import os
import shutil
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForCausalLM

from base.errors import UserError
from ckpt_tools.averaging import average_models
from ckpt_tools.export import export_all
from ckpt_tools.formats import parallel
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.hf_writer import write_weights
from ckpt_tools.hf.directory import CONFIGURATION_FILES
from ckpt_tools.hf.model import identify, load_hf_model
from ckpt_tools.released.download import download
from ckpt_tools.verify import verify
from tests.ckpt_tools.checkpoints import all_of, read_weights
from tests.conftest import make_hf_directory
from tests.digests import blake3_of
from tests.interpreter import interpreter
from tests.quant_eval.models import make_model
from tests.runs import PROJECT, execute, python
from train.run.directory import RunDirectory

UNIT_ROUNDOFF = 2.0**-24  # of fp32
PYTHIA = "EleutherAI/pythia-160m"  # whose naming the revisions have


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Five random models without lineage."""
    root = tmp_path_factory.mktemp("models")
    return [make_hf_directory(root / f"m{seed}", seed=seed) for seed in range(5)]


def numbers(hf_dir: Path) -> dict[str, NDArray[np.float64]]:
    """Every tensor in fp64, by safetensors."""
    return {
        name: weight.double().numpy()
        for name, weight in load_file(hf_dir / "model.safetensors").items()
    }


def lineage_of(hf_dir: Path) -> dict:
    return json.loads((hf_dir / "lineage.json").read_text())


@pytest.mark.parametrize(
    ("options", "method", "coefficients"),
    [
        ({}, "uniform", [0.2, 0.2, 0.2, 0.2, 0.2]),
        ({"weights": "0.9,0.3,0.1,0.1,0.6"}, "weighted", [0.45, 0.15, 0.05, 0.05, 0.3]),
        # beyond the last, away from the first
        ({"weights": "-1,0,0,0,3"}, "weighted", [-0.5, 0, 0, 0, 1.5]),
        # beyond both ends of what fp32 holds
        ({"weights": "1e-44,0,0,0,3e-44"}, "weighted", [0.25, 0, 0, 0, 0.75]),
        ({"weights": "1e300,0,0,0,3e300"}, "weighted", [0.25, 0, 0, 0, 0.75]),
    ],
    ids=["uniform", "weighted", "extrapolated", "tiny", "huge"],
)
def test_means_are_within_their_bound_of_the_exact_ones(
    models, tmp_path, options, method, coefficients
):
    """By fractions, on some elements of every tensor; the bound is AveragedWeights' own."""
    out = tmp_path / "out"
    average_models(out, models, **options)
    lineage = lineage_of(out)
    assert (lineage["method"], lineage["accumulate"], lineage["dtype"]) == (method, "fp32", "fp32")
    assert lineage["coefficients"] == pytest.approx(coefficients, rel=1e-15)
    inputs, averages = [numbers(path) for path in models], numbers(out)
    exact = [Fraction(value).limit_denominator(1000) for value in coefficients]
    assert sum(exact) == 1
    for name, average in averages.items():
        for place in list(np.ndindex(average.shape))[:: max(1, average.size // 40)]:
            terms = [
                share * Fraction(float(each[name][place]))
                for share, each in zip(exact, inputs, strict=True)
            ]
            error = abs(Fraction(float(average[place])) - sum(terms))
            rounding = (len(models) + 2) * UNIT_ROUNDOFF * float(sum(map(abs, terms)))
            assert error <= 1.01 * rounding + UNIT_ROUNDOFF * abs(average[place]), (name, place)


def test_uniform_means_are_numpys_and_torchs(models, tmp_path):
    """Bit for bit the fp32 sum in order, divided once; and torch's, which multiplies by 1/n."""
    average_models(tmp_path / "out", models)
    average = load_file(tmp_path / "out" / "model.safetensors")
    swa = AveragedModel(AutoModelForCausalLM.from_pretrained(models[0]))
    for path in models:
        swa.update_parameters(AutoModelForCausalLM.from_pretrained(path))
    by_torch = dict(swa.module.named_parameters())
    loaded = [load_file(path / "model.safetensors") for path in models]
    assert average.keys() == by_torch.keys()
    for name, weight in average.items():
        members = [each[name].numpy() for each in loaded]
        total = members[0] + members[1] + members[2] + members[3] + members[4]
        np.testing.assert_array_equal(weight.numpy(), total / np.float32(5))
        torch.testing.assert_close(weight, by_torch[name].detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            weight, torch.stack([each[name] for each in loaded]).mean(0), rtol=1e-6, atol=1e-7
        )


def test_16_bit_models_are_rounded_once(tmp_path):
    """Sums of a few bf16 numbers are all but exact in fp32, which decides hardly a rounding."""
    paths = [
        make_hf_directory(tmp_path / f"m{seed}", seed=seed, dtype=torch.bfloat16)
        for seed in range(3)
    ]
    average_models(tmp_path / "out", paths)
    inputs = [load_file(path / "model.safetensors") for path in paths]
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").config
    assert config.dtype == torch.bfloat16
    differing = total = 0
    for name, weight in load_file(tmp_path / "out" / "model.safetensors").items():
        assert weight.dtype == config.dtype
        mean = torch.stack([each[name].double() for each in inputs]).sum(0) / 3
        differing += int((weight != mean.bfloat16()).sum())
        total += weight.numel()
        torch.testing.assert_close(weight.double(), mean, rtol=2**-8, atol=1e-7)
    assert differing <= 1e-3 * total


def test_lawa_windows_are_means_of_consecutive_inputs_and_kept(models, tmp_path):
    out = tmp_path / "lawa"
    average_models(out, models, window=3)
    names = ["lawa3-m2", "lawa3-m3", "lawa3-m4"]
    assert sorted(path.name for path in out.iterdir()) == names
    for first, name in enumerate(names):
        members = [numbers(path) for path in models[first : first + 3]]
        for key, average in numbers(out / name).items():
            np.testing.assert_allclose(
                average, sum(each[key] for each in members) / 3, rtol=1e-6, atol=1e-8
            )
        assert lineage_of(out / name)["method"] == "lawa"
    inodes = {
        (name, file): (out / name / file).stat().st_ino
        for name in names
        for file in ("model.safetensors", "lineage.json")
    }
    (out / names[1] / "model.safetensors").write_bytes(b"damaged")
    average_models(out, models, window=3)
    written = [place for place in inodes if out.joinpath(*place).stat().st_ino != inodes[place]]
    assert written == [(names[1], "model.safetensors")], "what is damaged, alone"
    assert verify(out / names[1])["verdict"].startswith("sound and finite")


def test_soups_of_one_run_and_over_runs_and_engines(trained, tmp_path):
    """The mean of one run tells of that run; of two runs, by each engine, the steps alone."""
    runs = {layout: RunDirectory(trained(layout)) for layout in ("dp1", "ds-zero1")}
    checkpoints = [runs["dp1"].checkpoint(step) for step in (10, 20)]
    checkpoints += [runs["ds-zero1"].checkpoint(20)]
    exports = [tmp_path / "hf" / name for name in ("first", "last", "other")]
    export_all(list(zip(checkpoints, exports, strict=True)))
    first, last, other = (read_weights(path) for path in checkpoints)
    soup, mixed = tmp_path / "hf" / "soup-step00000020", tmp_path / "mixed"
    average_models(soup, exports[:2])
    weights = all_of(HFWeights(soup))
    assert weights.keys() == first.keys()
    assert all(
        torch.equal(weight, (first[name] + last[name]) / 2) for name, weight in weights.items()
    )
    for name in (*CONFIGURATION_FILES, "tokenizer.json", "tokenizer_config.json"):
        assert (soup / name).read_bytes() == (exports[1] / name).read_bytes()
    newest, lineage = lineage_of(exports[1]), lineage_of(soup)
    for key in ("run", "fingerprint", "step", "tokens", "learning_rate"):
        assert lineage[key] == newest[key]
    assert lineage["steps"] == [10, 20]
    assert [each["path"] for each in lineage["ingredients"]] == ["first", "last"]
    assert identify(soup)["weights_digests"] == {
        "model.safetensors": blake3_of(soup / "model.safetensors")
    }
    assert load_hf_model(soup, torch.float32).num_parameters() == sum(
        weight.numel() for weight in first.values()
    )
    average_models(mixed, [soup, exports[2]])  # an average and an export of another run
    half = load_file(mixed / "model.safetensors")
    assert all(
        torch.equal(weight, (weights[name] + other[name]) / 2) for name, weight in half.items()
    )
    lineage = lineage_of(mixed)
    assert not {"run", "fingerprint", "step"} & lineage.keys()
    origins = [(each["run"], each["step"]) for each in lineage["ingredients"]]
    assert origins == [("dp1", 20), ("ds-zero1", 20)]


@pytest.fixture(scope="module")
def sharded(models, tmp_path_factory) -> list[Path]:
    """The same models in several files each, all divided alike."""
    root = tmp_path_factory.mktemp("sharded")
    for source in models:
        (root / source.name).mkdir()
        write_weights(root / source.name, HFWeights(source), shard_bytes=30_000)
        (root / source.name / "config.json").write_bytes((source / "config.json").read_bytes())
    assert len(list((root / "m0").glob("*.safetensors"))) > 3
    return [root / source.name for source in models]


def check_hashes(out: Path, inputs: list[Path]) -> None:
    for path, ingredient in zip(inputs, lineage_of(out)["ingredients"], strict=True):
        files = {file.name: blake3_of(file) for file in path.glob("*.safetensors")}
        assert {name: record["digest"] for name, record in ingredient["files"].items()} == files


def test_files_do_not_depend_on_the_number_of_threads(models, sharded, tmp_path, monkeypatch):
    """Nor on how models are divided into files; pieces are of a few rows."""
    monkeypatch.setattr("ckpt_tools.formats.hf_writer.CHUNK_BYTES", 1000)
    average_models(tmp_path / "whole", models)
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    for threads in (1, 2, 5):
        out = tmp_path / str(threads)
        monkeypatch.setattr(parallel, "default_threads", lambda count=threads: count)
        average_models(out, sharded)
        assert lineage_of(out)["files"] == lineage_of(tmp_path / "1")["files"]
        assert all(
            torch.equal(weight, expected[name]) for name, weight in all_of(HFWeights(out)).items()
        )
        assert len(AutoModelForCausalLM.from_pretrained(out).state_dict()) == len(expected)
    mixed = [sharded[0], models[1], *sharded[2:]]
    average_models(tmp_path / "mixed", mixed)
    check_hashes(tmp_path / "mixed", mixed)
    assert lineage_of(tmp_path / "mixed")["files"] == lineage_of(tmp_path / "1")["files"]


# 20 MB each
LARGE: dict[str, Any] = {"vocab_size": 40_000, "hidden_size": 64, "num_attention_heads": 4}
MEASURED = """
import sys
from pathlib import Path
from typing import Any
from ckpt_tools.averaging import average_models
from ckpt_tools.formats import parallel
out, *inputs = map(Path, sys.argv[1:])
parallel.default_threads = lambda: 1
average_models(out, inputs)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> list[Path]:
    """Twelve models whose weights are links to the same file."""
    root = tmp_path_factory.mktemp("large")
    first = make_hf_directory(root / "0", **LARGE)
    for index in range(1, 12):
        (root / str(index)).mkdir()
        for path in first.iterdir():
            os.link(path, root / str(index) / path.name)
    return [root / str(index) for index in range(12)]


def test_memory_does_not_grow_with_the_number_of_models(large, tmp_path):
    peak_kib = []
    for count in (2, 12):
        arguments = map(str, (tmp_path / str(count), *large[:count]))
        done = execute([interpreter(), "-c", MEASURED, *arguments], cwd=PROJECT)
        assert done.returncode == 0, done.stderr
        peak_kib.append(int(done.stdout.split()[-1]))
    model_kib = (large[0] / "model.safetensors").stat().st_size / 1024
    # ten more are read; the allocator alone varies by some of them
    assert peak_kib[1] - peak_kib[0] < 5 * model_kib


DYING = """
import os, runpy, signal, sys
out = sys.argv.pop(1)

def die(event, arguments):
    if event == "os.rename" and str(arguments[1]) == out:
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(die)
runpy.run_module("ckpt_tools", run_name="__main__", alter_sys=True)
"""


def test_a_kill_leaves_nothing_half_written(large, tmp_path):
    """Killed when all is written aside and only the name is missing."""
    out = tmp_path / "out"
    arguments = ["average", str(out), *map(str, large)]
    done = execute([interpreter(), "-c", DYING, str(out), *arguments], cwd=PROJECT)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.glob(".out.partial/*.safetensors"))
    assert not out.exists()
    done = python("ckpt_tools", *arguments)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    first = load_file(large[0] / "model.safetensors")
    assert all(
        torch.allclose(weight, first[name])
        for name, weight in load_file(out / "model.safetensors").items()
    )


@pytest.mark.parametrize("name", ["apertus", "gpt_neox", "mistral", "llama-tied", "olmo"])
def test_whatever_is_measured_is_averaged(tmp_path, name):
    """Families that are not trained, too: by numpy, of a model and one of half its weights."""
    whole = make_model(tmp_path / "whole", name)
    weights = safetensors.numpy.load_file(whole / "model.safetensors")
    half = shutil.copytree(whole, tmp_path / "half")
    halves = {key: np.asarray(weight * np.float32(0.5)) for key, weight in weights.items()}
    safetensors.numpy.save_file(halves, half / "model.safetensors", {"format": "pt"})
    average_models(tmp_path / "mean", [whole, half])
    mean = safetensors.numpy.load_file(tmp_path / "mean" / "model.safetensors")
    assert mean.keys() == weights.keys()
    for key, weight in mean.items():
        expected = (weights[key] + halves[key]) / np.float32(2)
        np.testing.assert_array_equal(weight, expected, err_msg=key)


def test_of_downloads_the_lineage_has_their_revisions(models, tmp_path):
    names = ["step1000", "step2000"]
    for name, model in zip(names, models, strict=False):
        shutil.copytree(model, tmp_path / "models" / name)
    download(str(tmp_path / "models"), tmp_path / "fetched", family=PYTHIA, revisions=names)
    fetched = [tmp_path / "fetched" / name for name in names]
    average_models(tmp_path / "mean", fetched)
    ingredients = lineage_of(tmp_path / "mean")["ingredients"]
    assert [(each["repo"], each["revision"]) for each in ingredients] == [
        (PYTHIA, name) for name in names
    ]
    weights = fetched[0] / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match=r"step1000.*model\.safetensors"):
        average_models(tmp_path / "other", fetched)
    assert not (tmp_path / "other").exists()
