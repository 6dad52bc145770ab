"""Checkpoints rewritten for another layout without an engine, against what the engine itself saves there."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_tools.export import export
from ckpt_tools.reshard import reshard_checkpoint
from tests.ckpt_tools.checkpoints import seal
from tests.runs import error_line, make_run, python, ranks
from train.command import UserError
from train.config import dump_run, load_run
from train.run_directory import CHECKPOINT_JSON, read_checkpoint_record, verify_checkpoint, write_json
from train.settings import Lawa, ParallelConfig

BESIDE = {CHECKPOINT_JSON, ".metadata", "probe.safetensors"}  # of a checkpoint, beside what engines write alike


def save_again(run_dir: str, wanted: str) -> None:
    """Worker, on every rank: loads checkpoint after checkpoint into an engine of the run's layout and saves each."""
    from train.distributed import start
    from train.megatron.engine import MegatronEngine

    engine = MegatronEngine(load_run(Path(run_dir) / "run.json"), start())
    for checkpoint, out, weights_only in json.loads(wanted):
        engine.load(Path(checkpoint))
        snapshot = engine.snapshot(Path(out), weights_only=weights_only)
        snapshot.write()
        snapshot.seal()
    engine.close()


@pytest.fixture(scope="module")
def averaged(tmp_path_factory, inputs) -> Path:
    """A run with grouped queries that keeps two averages."""
    directory = tmp_path_factory.mktemp("averaged") / "run"
    lawa = (Lawa(interval_steps=2, window=2), Lawa(interval_steps=5, window=2))
    make_run(directory, **inputs, kv_heads=2, averages=lawa, total_steps=20)
    done = ranks(1, "train", "run", str(directory))
    assert done.returncode == 0, done.stderr[-3000:]
    return directory


def described(checkpoint: Path) -> tuple[Any, Any]:
    """What `.metadata` says: every key with its type, size and boxes, and where each box lies."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    tensors = {
        key: (stored.properties, stored.size, {(box.offsets, box.sizes) for box in stored.chunks})
        if isinstance(stored, TensorStorageMetadata)
        else stored
        for key, stored in metadata.state_dict_metadata.items()
    }
    return tensors, metadata.storage_data


def shards(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name not in BESIDE}


@pytest.mark.parametrize(
    ("source", "names", "parallel", "data"),
    [
        ("averaged", ["step00000020", "lawa2x5-step00000020"], {"tensor": 2}, 2),
        ("dp1", ["step00000010"], {"pipeline": 2, "virtual_pipeline": 2}, 1),
        ("tp2pp2", ["step00000010"], {}, 1),
    ],
    ids=["averages-to-tp2dp2", "dp1-to-interleaved", "tp2pp2-to-dp1"],
)
def test_files_are_those_of_the_engine_and_it_goes_on_from_them(
    trained, averaged, tmp_path, source, names, parallel, data
):
    """Every rank's file is the engine's byte for byte, so are keys, boxes and types; loaded, they give them again."""
    run_dir = averaged if source == "averaged" else trained(source)
    wanted = []
    for name in names:
        checkpoint, resharded = run_dir / "checkpoints" / name, tmp_path / "resharded" / name
        reshard_checkpoint(checkpoint, resharded, **parallel, data=data, processes=2)
        for origin, place in ((checkpoint, "engine"), (resharded, "again")):
            (tmp_path / place / name).mkdir(parents=True)
            wanted.append((str(origin), str(tmp_path / place / name), name.startswith("lawa")))
    run = load_run(run_dir / "run.json").model_copy(update={"parallel": ParallelConfig(**parallel)})
    write_json(tmp_path / "run.json", dump_run(run))
    processes = run.parallel.tensor * run.parallel.pipeline * data
    worker = ("tests.ckpt_tools.test_offline_reshard", str(tmp_path), json.dumps(wanted))
    done = ranks(processes, *worker)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in names:
        checkpoint, resharded = run_dir / "checkpoints" / name, tmp_path / "resharded" / name
        expected = shards(tmp_path / "engine" / name)
        assert len(expected) == processes + 2
        assert shards(resharded) == expected == shards(tmp_path / "again" / name)
        assert described(resharded) == described(tmp_path / "engine" / name)
        before, after = verify_checkpoint(checkpoint), verify_checkpoint(resharded)
        changes = {"layout": after.layout, "world_size": processes, "files": after.files}
        assert before.model_copy(update=changes) == after
        whole = {"tensor": 1, "pipeline": 1, "virtual_pipeline": 1, "context": 1}
        assert after.layout == {**whole, **parallel, "data": data}
        assert after.files["probe.safetensors"] == before.files["probe.safetensors"]


def test_a_resharded_checkpoint_is_exported_as_the_original(trained, tmp_path):
    """Beside a run.json, as any checkpoint; the probe proves the weights."""
    (tmp_path / "checkpoints").mkdir()
    shutil.copyfile(trained("dp1") / "run.json", tmp_path / "run.json")
    original = trained("dp1") / "checkpoints" / "step00000020"
    reshard_checkpoint(original, tmp_path / "checkpoints" / "step00000020", tensor=4, pipeline=2)
    for run_dir, out in ((trained("dp1"), "before"), (tmp_path, "after")):
        export(run_dir / "checkpoints" / "step00000020", tmp_path / out)
    before, after = (load_file(tmp_path / out / "model.safetensors") for out in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_a_second_reshard_changes_nothing_and_nothing_else_is_replaced(trained, tmp_path):
    checkpoint, out = trained("dp1") / "checkpoints" / "step00000010", tmp_path / "out"
    reshard_checkpoint(checkpoint, out, tensor=2)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    reshard_checkpoint(checkpoint, out, tensor=2)
    assert before == {path: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / "__1_0.distcp").write_bytes(b"damaged")
    reshard_checkpoint(checkpoint, out, tensor=2)
    verify_checkpoint(out)
    for origin, layout in (
        (checkpoint, {"data": 2}),
        (trained("dp1") / "checkpoints" / "step00000020", {"tensor": 2}),
    ):
        with pytest.raises(UserError, match="exists and is not this checkpoint at this layout"):
            reshard_checkpoint(origin, out, **layout)  # type: ignore[arg-type]
    assert before.keys() == set(out.iterdir())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tensor": 3}, "4 heads and 4 KV heads do not divide over parallel.tensor 3"),
        ({"pipeline": 3}, "4 layers do not divide over parallel.pipeline 3"),
        ({"pipeline": 2, "virtual_pipeline": 4}, "4 layers do not divide over parallel.pipeline 8"),
        ({"virtual_pipeline": 2}, "virtual_pipeline needs pipeline above 1"),
        ({"zero": 1}, "--zero belongs to deepspeed"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(trained, tmp_path, options, expected):
    with pytest.raises(UserError, match=expected):
        reshard_checkpoint(trained("dp1") / "checkpoints" / "step00000010", tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_what_is_damaged_or_needs_no_layout_is_refused(trained, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoints" / "step00000010"
    shutil.copytree(trained("dp1") / "checkpoints" / "step00000010", checkpoint)
    metadata = bytearray((checkpoint / ".metadata").read_bytes())
    metadata[100] ^= 1
    (checkpoint / ".metadata").write_bytes(metadata)
    done = python("ckpt_tools", "reshard", str(checkpoint), str(tmp_path / "out"), "--tensor", "2")
    assert ".metadata was changed after it was written" in error_line(done)
    seal(checkpoint, engine="either")
    with pytest.raises(UserError, match="weights alone, which start either engine"):
        reshard_checkpoint(checkpoint, tmp_path / "out", tensor=2)
    record = read_checkpoint_record(trained("dp1") / "checkpoints" / "step00000010").model_dump(mode="json")
    shutil.copyfile(trained("dp1") / "checkpoints" / "step00000010" / ".metadata", checkpoint / ".metadata")
    climbing = {"../.metadata": record["files"][".metadata"]}
    shutil.copyfile(checkpoint / ".metadata", checkpoint.parent / ".metadata")
    write_json(checkpoint / CHECKPOINT_JSON, record | {"files": record["files"] | climbing})
    with pytest.raises(UserError, match=r"names '\.\./\.metadata', which lies elsewhere"):
        reshard_checkpoint(checkpoint, tmp_path / "out", tensor=2)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


if __name__ == "__main__":
    save_again(*sys.argv[1:])
