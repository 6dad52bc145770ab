"""Inspection: keys, shapes and types as other readers find them, damage named by file, no pickle opened unchecked."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoModelForCausalLM

from ckpt_tools.averaging.average import average_models
from ckpt_tools.export import export
from ckpt_tools.inspecting.inspection import describe, inspect
from tests.ckpt_tools.checkpoints import seal
from tests.runs import error_line, python
from train.command import UserError
from train.run_directory import read_checkpoint_record, record_file


class Trap:
    """Pickled, it makes a file when it is opened."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self):
        return os.mkdir, (str(self.sprung),)


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A run of one's own, with one export."""
    directory = shutil.copytree(trained("dp1"), tmp_path / "dp1")
    export(directory / "checkpoints/step00000020", directory / "hf/step00000020")
    return directory


def stored(description: dict[str, Any], group: str = "weights") -> dict[str, tuple[tuple[int, ...], str]]:
    keys = description["tensors"][group]["stored"]
    return {name: (tuple(held["shape"]), held["dtype"]) for name, held in keys.items()}


def described(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (tuple(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in tensors.items()}


def test_keys_of_a_megatron_checkpoint_are_those_that_torch_loads(trained, tmp_path):
    checkpoint = trained("tp2pp2") / "checkpoints/step00000020"
    found = describe(checkpoint)
    assert set(found["tensors"]) == {"weights", "objects", *(f"optimizer {part}" for part in PARTS)}
    state = {
        name: torch.full(shape, torch.nan, dtype=getattr(torch, dtype))
        for group in found["tensors"]
        if group != "objects"
        for name, (shape, dtype) in stored(found, group).items()
    }
    load(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    assert all(tensor.isfinite().all() for tensor in state.values()), "a shape was too large"
    export(checkpoint, tmp_path / "hf")
    parameters = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").num_parameters()
    assert found["parameters"] == parameters
    assert {part: found["tensors"][f"optimizer {part}"]["numbers"] for part in PARTS} == dict.fromkeys(
        PARTS, parameters
    )
    assert found["tensors"]["weights"]["bytes"] == 4 * parameters


PARTS = ("param", "exp_avg", "exp_avg_sq")


def test_keys_of_a_deepspeed_checkpoint_join_the_ranges_of_its_ranks(trained):
    checkpoint = trained("ds-zero1") / "checkpoints/step00000020"
    found = describe(checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    assert stored(found) == described(weights)
    flat = {name: ((weight.numel(),), "float32") for name, weight in weights.items()}
    for part in ("weights", "exp_avg", "exp_avg_sq"):
        assert stored(found, f"optimizer {part}") == flat
    assert {file["state"] for file in found["files"].values()} == {"verified"}


def test_a_sharded_hf_directory_without_lineage(hf_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(hf_dir).bfloat16()
    model.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    found = describe(tmp_path / "hf")
    assert stored(found) == described(model.state_dict())
    assert found["parameters"] == model.num_parameters()
    assert found["kind"] == "HF directory, without lineage"
    assert {file["state"] for file in found["files"].values()} == {"no hash recorded"}
    assert found["damage"] == found["warnings"] == []
    assert "stored" not in describe(tmp_path / "hf", keys=False)["tensors"]["weights"]
    index = tmp_path / "hf/model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "model-00001-of-00009.safetensors"
    index.write_text(json.dumps(content))
    assert "is missing" in describe(tmp_path / "hf")["damage"][0]


def test_what_a_checkpoint_and_its_export_are_and_what_made_them(run, capsys):
    checkpoint = run / "checkpoints/step00000020"
    record = read_checkpoint_record(checkpoint)
    attempt = json.loads((run / "environment.json").read_text())["attempts"][0]
    for path, kind in ((checkpoint, "megatron checkpoint"), (run / "hf/step00000020", "HF directory, export")):
        found = describe(path)
        assert found["kind"] == kind
        for key in ("run", "step", "tokens", "learning_rate", "train_loss", "held_out_loss", "engine", "layout"):
            assert found[key] == getattr(record, key)
        assert found["damage"] == found["warnings"] == []
        assert found["bytes"] == sum((path / name).stat().st_size for name in found["files"])
        capsys.readouterr()
        inspect(path)
        printed = capsys.readouterr().out
        assert all(name in printed for name in (*found["files"], *found["tensors"]["weights"]["stored"]))
        inspect(path, as_json=True)
        assert json.loads(capsys.readouterr().out) == found
    assert describe(checkpoint)["made_by"] == {"attempt": 1, **attempt}
    made_by = describe(run / "hf/step00000020")["made_by"]
    assert (made_by["checkpoint"], made_by["kind"]) == (str(checkpoint), "export")
    assert made_by["environment"]["commit"] == attempt["commit"]
    elsewhere = shutil.copytree(checkpoint, run.parent / "elsewhere")
    assert "what wrote it is unknown" in describe(elsewhere)["warnings"][0]


def test_an_average_and_an_import_say_so(run):
    checkpoint = run / "checkpoints/step00000020"
    average = {"kind": "lawa", "interval_steps": 5, "window": 3, "steps": [10, 15, 20]}
    seal(checkpoint, average=average)
    found = describe(checkpoint, hashes=False)
    assert (found["kind"], found["made_by"]["average"]) == ("megatron checkpoint of an average", average)
    assert {file["state"] for file in found["files"].values()} == {"not checked"}
    source = {"source": "allenai/OLMo-2-0425-1B", "revision": "stage1-step40000-tokens84B"}
    seal(checkpoint, average=None, imported=source)
    found = describe(checkpoint)
    assert (found["kind"], found["made_by"]) == ("imported megatron checkpoint", {"imported": source})


def test_an_average_of_files_shows_its_ingredients(run):
    average_models(run / "hf/soup", [run / "checkpoints/step00000010", run / "hf/step00000020"], weights="1,3")
    found = describe(run / "hf/soup")
    assert (found["kind"], found["step"], found["damage"]) == ("HF directory, average", 20, [])
    assert found["made_by"]["coefficients"] == [0.25, 0.75]
    assert [held["path"] for held in found["made_by"]["ingredients"]] == ["../checkpoints/step00000010", "step00000020"]


def test_a_download_is_checked_against_its_record(run):
    hf_dir = run / "hf/step00000020"
    (hf_dir / "lineage.json").unlink()
    record = {"repo": "owner/name", "revision": "stage1-step20-tokens1B", "commit": "c" * 40}
    files = {"model.safetensors": record_file(hf_dir / "model.safetensors").model_dump()}
    (hf_dir / "download.json").write_text(json.dumps(record | {"files": files}))
    found = describe(hf_dir)
    assert (found["kind"], found["made_by"]) == ("HF directory, downloaded", {"download": record})
    assert found["files"]["model.safetensors"]["state"] == "verified"


@pytest.mark.parametrize(
    "name",
    ["checkpoints/step00000020/__0_0.distcp", "checkpoints/step00000020/.metadata", "hf/step00000020/tokenizer.json"],
)
def test_damage_is_named_after_everything_was_printed(run, name, capsys):
    path = run / name
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"DAMAGED: \S*{path.name} was changed"):
        inspect(path.parent)
    lines = capsys.readouterr().out.splitlines()
    files = describe(path.parent)["files"]
    assert {other for other, file in files.items() if file["state"] == "verified"} == files.keys() - {path.name}
    assert any(path.name in line and "DAMAGED" in line for line in lines)
    assert any("commit" in line for line in lines)
    with pytest.raises(UserError, match="was changed"):
        inspect(run)
    assert describe(run)["parts"][str(path.parent.relative_to(run))]["state"].startswith("DAMAGED")
    path.unlink()
    assert describe(path.parent)["files"][path.name]["state"] == f"DAMAGED: {path} is missing"


@pytest.mark.parametrize("hashes", [True, False])
def test_a_changed_pickle_is_never_opened(run, tmp_path, hashes):
    metadata, sprung = run / "checkpoints/step00000020/.metadata", tmp_path / "sprung"
    metadata.write_bytes(pickle.dumps(Trap(sprung)))
    found = describe(metadata.parent, hashes=hashes)
    assert not sprung.exists()
    assert (found["tensors"], found["parameters"]) == ({}, None)
    assert len(found["damage"]) == 1
    assert str(metadata) in found["damage"][0]
    pickle.loads(metadata.read_bytes())
    assert sprung.exists(), "the trap works"


def test_pickles_in_an_hf_directory_are_reported_and_not_opened(run, tmp_path):
    hf_dir, sprung = run / "hf/step00000020", tmp_path / "sprung"
    (hf_dir / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(sprung)))
    found = describe(hf_dir)
    assert "pytorch_model.bin may be a pickle" in found["warnings"][0]
    assert found["damage"] == []
    (hf_dir / "model.safetensors").unlink()
    assert "model.safetensors is missing" in describe(hf_dir)["damage"][0]
    assert not sprung.exists()


def test_a_run_lists_its_checkpoints_and_exports(run):
    found = describe(run)
    names = [*(f"checkpoints/step{step:08d}" for step in (0, 10, 20)), "hf/step00000020"]
    assert list(found["parts"]) == names
    assert {part["state"] for part in found["parts"].values()} == {"verified"}
    assert (found["kind"], found["status"], found["total_tokens"]) == ("run", "done", 5120)
    losses = [found["parts"][name]["held_out_loss"] for name in names]
    assert losses == [read_checkpoint_record(run / names[index]).held_out_loss for index in (0, 1, 2, 2)]
    (run / names[1] / "checkpoint.json").unlink()
    assert "is no complete checkpoint" in describe(run)["damage"][0]


def test_the_command_ends_with_2_where_something_is_damaged_or_nothing_is_there(run):
    (run / "hf/step00000020/config.json").write_text("{}")
    done = python("ckpt_tools", "inspect", str(run / "hf/step00000020"), "--json")
    assert "config.json has 2 bytes instead of" in error_line(done)
    assert json.loads(done.stdout)["files"]["model.safetensors"]["state"] == "verified"


def test_what_is_nothing_of_that_kind_is_refused(run, tmp_path):
    for path, expected in (
        (tmp_path / "none", "does not exist"),
        (tmp_path, "is no checkpoint, HF directory or run directory"),
    ):
        with pytest.raises(UserError, match=expected):
            describe(path)
    (run / "checkpoints/step00000020/checkpoint.json").unlink()
    with pytest.raises(UserError, match="is no complete checkpoint"):
        describe(run / "checkpoints/step00000020")
