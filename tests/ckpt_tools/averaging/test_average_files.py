"""Averages as files: whatever the threads, in bounded memory, and whole through a kill."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ckpt_tools.averaging import average_models
from ckpt_tools.formats import parallel
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.hf_writer import write_weights
from tests.ckpt_tools.checkpoints import all_of
from tests.conftest import make_hf_directory
from tests.digests import blake3_of
from tests.interpreter import interpreter
from tests.runs import PROJECT, execute, python


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Three random models without lineage."""
    root = tmp_path_factory.mktemp("models")
    return [make_hf_directory(root / f"m{seed}", seed=seed) for seed in range(3)]


def lineage_of(hf_dir: Path) -> dict:
    return json.loads((hf_dir / "lineage.json").read_text())


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
    mixed = [sharded[0], models[1], sharded[2]]
    average_models(tmp_path / "mixed", mixed)
    check_hashes(tmp_path / "mixed", mixed)
    assert lineage_of(tmp_path / "mixed")["files"] == lineage_of(tmp_path / "1")["files"]


LARGE: dict[str, Any] = {
    "vocab_size": 40_000,
    "hidden_size": 64,
    "num_attention_heads": 4,
}  # 20 MB each
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
        command = [
            interpreter(),
            "-c",
            MEASURED,
            str(tmp_path / str(count)),
            *map(str, large[:count]),
        ]
        done = execute(command, cwd=PROJECT)
        assert done.returncode == 0, done.stderr
        peak_kib.append(int(done.stdout.split()[-1]))
    model_kib = (large[0] / "model.safetensors").stat().st_size / 1024
    assert (
        peak_kib[1] - peak_kib[0] < 5 * model_kib
    )  # ten more are read; the allocator alone varies by some of them


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
