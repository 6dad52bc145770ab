"""Inspection opens no pickle; with --verify, damage is named by file."""

import json
import os
import pickle
import shutil
import tracemalloc
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from base.environment import version
from base.errors import UserError
from base.files import record_file
from ckpt_tools.averaging import average_models
from ckpt_tools.export import export
from ckpt_tools.inspecting import describe, inspect
from tests.ckpt_tools.checkpoints import seal
from tests.runs import error_line, python
from tests.sealing import reseal
from tests.train.trajectories import flip_a_byte
from train.run.directory import CHECKPOINT_JSON, read_checkpoint_record


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


def test_a_checkpoint_and_its_export_tell_the_same(run, capsys):
    checkpoint, exported = run / "checkpoints/step00000020", run / "hf/step00000020"
    record = read_checkpoint_record(checkpoint)
    parameters = AutoModelForCausalLM.from_pretrained(exported).num_parameters()
    for path, kind in ((checkpoint, "checkpoint"), (exported, "HF directory, export")):
        description = describe(path)
        assert (description["kind"], description["parameters"]) == (kind, parameters)
        for key in ("run", "step", "tokens", "learning_rate", "engine", "layout"):
            assert description[key] == getattr(record, key)
        assert description["files"] == {
            str(file.relative_to(path)): file.stat().st_size
            for file in path.rglob("*")
            if file.is_file()
        }
        assert description["bytes"] == sum(description["files"].values())
        capsys.readouterr()
        inspect([path], whole=True)
        printed = capsys.readouterr().out
        assert all(name in printed for name in description["files"])
        assert "320x32  model.embed_tokens.weight\n" in printed
        inspect([path])
        short = capsys.readouterr().out
        assert short.splitlines()[0] == f"{path}: {kind}"
        assert len(short.splitlines()) <= 20
        assert f"  tokens          {record.tokens:,}\n" in short
        assert f"  held out loss   {record.held_out_loss:.4f} nats/token\n" in short
        counts = f"{len(description['files'])} files, {len(description['tensors'])} tensors"
        assert f" in {counts}; --all lists them\n" in short
        assert ("  weights only    no\n" in short) == (path == checkpoint)
    assert describe(checkpoint)["quantdyn"] == record.quantdyn == version()


def test_a_checkpoint_of_a_version_that_recorded_none_is_read(trained, tmp_path):
    directory = shutil.copytree(trained("dp1"), tmp_path / "dp1")
    checkpoint = directory / "checkpoints/step00000020"
    path, record = checkpoint / CHECKPOINT_JSON, read_checkpoint_record(checkpoint)
    content = json.loads(path.read_text())
    del content["quantdyn"]
    reseal(path, content)
    assert read_checkpoint_record(checkpoint) == record.model_copy(update={"quantdyn": None})
    assert "quantdyn" not in describe(checkpoint)


def test_averages_downloads_and_others_say_so(run, hf_dir):
    exported = run / "hf/step00000020"
    other = run / "hf/step00000010"
    export(run / "checkpoints/step00000010", other)
    average_models(run / "hf/soup", [other, exported])
    description = describe(run / "hf/soup")
    assert (description["kind"], description["step"]) == ("HF directory, average", 20)
    assert describe(hf_dir)["kind"] == "HF directory, without lineage"
    (exported / "lineage.json").unlink()
    record = {"repo": "owner/name", "revision": "stage1-step20-tokens1B", "commit": "c" * 40}
    files = {"model.safetensors": record_file(exported / "model.safetensors").model_dump()}
    reseal(exported / "download.json", record | {"files": files})
    description = describe(exported)
    assert description["kind"] == "HF directory, download"
    assert {key: description[key] for key in record} == record


def test_a_run_stands_for_its_checkpoints_and_exports(run, capsys):
    names = [*(f"checkpoints/step{step:08d}" for step in (0, 10, 20)), "hf/step00000020"]
    inspect([run], whole=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines if not line.startswith(" ")] == [
        str(run / name) for name in names
    ]

    inspect([run])
    title, heads, *rows, note = capsys.readouterr().out.splitlines()
    assert title.startswith(f"{run}: 4 directories, ")
    assert heads.split("  ")[0] == "directory"
    assert [row.split()[0] for row in rows] == names
    record = read_checkpoint_record(run / names[-2])
    cells = ("checkpoint", "20", f"{record.tokens:,}", f"{record.held_out_loss:.4f}")
    assert rows[2].split()[1:5] == [*cells]
    assert note.endswith("--all lists all facts, files and tensors")


@pytest.mark.parametrize(
    "name",
    [
        "checkpoints/step00000020/__0_0.distcp",
        "checkpoints/step00000020/optimizer__0_0.distcp",
        "checkpoints/step00000020/.metadata",
        "hf/step00000020/tokenizer.json",
    ],
)
def test_damage_is_named(run, name, capsys):
    path = run / name
    inspect([run], check=True)
    assert capsys.readouterr().out.startswith("4 of 4 are sound, by all of their files\n")
    flip_a_byte(path)
    inspect([path.parent])
    for place in (path.parent, run):
        with pytest.raises(UserError, match=rf"{path.name} was changed"):
            inspect([place], check=True)


def test_no_pickle_is_opened(run, tmp_path):
    metadata, sprung = run / "checkpoints/step00000020/.metadata", tmp_path / "sprung"
    metadata.write_bytes(pickle.dumps(Trap(sprung)))
    (run / "hf/step00000020/pytorch_model.bin").write_bytes(metadata.read_bytes())
    for path in (metadata.parent, run / "hf/step00000020"):
        describe(path)
    with pytest.raises(UserError, match="metadata"):
        inspect([metadata.parent], check=True)
    assert not sprung.exists()
    pickle.loads(metadata.read_bytes())  # made above: shows that the trap works
    assert sprung.exists(), "the trap works"


def test_the_command_checks_all_and_refuses_the_first(run, tmp_path):
    good, bad = run / "hf/step00000020", tmp_path / "bad"
    shutil.copytree(good, bad)
    (bad / "config.json").write_text("{}")
    done = python("ckpt_tools", "inspect", str(bad), str(good), "--verify")
    assert "1 of 2 failed: " in error_line(done)
    assert "config.json has 2 bytes instead of" in error_line(done)
    first = f"{good}: HF directory, export, computes what the megatron engine did, at step 20"
    assert done.stdout.splitlines()[0] == first


def test_what_is_nothing_of_that_kind_is_refused(run, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(run / "run.json", empty)
    for path in (tmp_path / "none", tmp_path, empty):
        with pytest.raises(UserError, match=f"{path} is no checkpoint or HF directory, nor a run"):
            inspect([path])


def test_a_record_of_a_hundred_million_layers_takes_no_memory(run):
    checkpoint = run / "checkpoints/step00000020"
    record = json.loads((checkpoint / "checkpoint.json").read_text())
    record["model"]["num_hidden_layers"] = 100_000_000
    seal(checkpoint, model=record["model"])
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="'num_hidden_layers': Input should be less than"):
            describe(checkpoint)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
