"""DeepSpeed checkpoints rewritten for other ranks and stages without an engine, against what the engine saves there."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools.reshard import reshard_checkpoint
from tests.ckpt_tools.checkpoints import write_record
from tests.runs import ranks
from tests.train.test_deepspeed import batch_of, small_run
from train.command import UserError
from train.config import RunConfig, dump_run
from train.engine import Batch, StepResult
from train.run_directory import RunDirectory, verify_checkpoint, write_json
from train.schedules import learning_rate
from train.settings import Ema

MODULE = "tests.ckpt_tools.test_offline_reshard_deepspeed"
SAVED_AT, LAST = 3, 5


def named(name: str) -> RunConfig:
    """s1: stage 1 in fp32 with an average, s2-plain: without one, b1: in bf16. Six sequences fit 1, 2 and 3 ranks."""
    stage, precision = int(name[1]), {"s": "fp32", "b": "bf16"}[name[0]]
    averages = () if stage == 3 or name.endswith("plain") else (Ema(decay=0.9),)
    sizes: dict[str, Any] = {"batch_size": 6, "micro_batch_size": 1, "total_steps": LAST}
    return small_run(name, stage=stage, precision=precision, averages=averages, **sizes)


def train_on(engine: Any, first: int, last: int) -> list[list[float]]:
    return [
        list(
            engine.train_step(
                Batch.of(batch_of(10 + step).tokens_BS[:6]), learning_rate(engine.run, step), StepResult.is_finite
            )
        )
        for step in range(first, last + 1)
    ]


def work(jobs: str, out: str) -> None:
    """Worker, on every rank: for every [name, checkpoint or "", place] trains or loads, saves there, trains on."""
    import torch.distributed as dist

    from train.averaging import slot_names
    from train.deepspeed.engine import DeepSpeedEngine
    from train.distributed import start

    device, rows = start(), {}
    for name, checkpoint, place in json.loads(jobs):
        run = named(name)
        engine = DeepSpeedEngine(run, device)
        if checkpoint:
            engine.load(Path(checkpoint))
        else:
            train_on(engine, 1, SAVED_AT)
            for slot in slot_names(run):
                for shard, copy in zip(engine.weights(), engine.slot(slot), strict=True):
                    copy.copy_(shard.weights).mul_(2)
        snapshot = engine.snapshot(Path(place), weights_only=False)
        snapshot.write()
        dist.barrier()
        snapshot.seal()
        rows[place] = train_on(engine, SAVED_AT + 1, LAST)
    if dist.get_rank() == 0:
        write_json(Path(out), rows)
    engine.close()


def on_ranks(processes: int, jobs: list[tuple[str, str, Path]], out: Path) -> dict[str, list[list[float]]]:
    """What `work` reports: the losses and gradient norms behind each place."""
    for _, _, place in jobs:
        place.mkdir(parents=True)
    shown = json.dumps([(name, checkpoint, str(place)) for name, checkpoint, place in jobs])
    done = ranks(processes, MODULE, shown, str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    rows: dict[str, list[list[float]]] = json.loads(out.read_text())
    return rows


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, list[list[float]]]]:
    """Runs s1, b1 and s3 of two ranks with a checkpoint each, and how they went on."""
    root = tmp_path_factory.mktemp("two")
    names = ("s1", "b1", "s3")
    jobs = [(name, "", RunDirectory(root / name).checkpoint(SAVED_AT)) for name in names]
    rows = on_ranks(2, jobs, root / "rows.json")
    for name, _, checkpoint in jobs:
        run = named(name)
        write_json(root / name / "run.json", dump_run(run))
        torch.save({}, checkpoint / "probe.safetensors")  # no layout depends on it
        write_record(checkpoint, run, SAVED_AT, layout={"tensor": 1, "pipeline": 1, "data": 2, "zero": run.zero.stage})
    return root, {name: rows[str(checkpoint)] for name, _, checkpoint in jobs}


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (1, [("s1", "s2"), ("s1", "s0"), ("b1", "b2"), ("s3", "s3"), ("s3", "s2-plain")]),
        (3, [("s1-on-1", "s1"), ("b1", "b1"), ("s3", "s3")]),
    ],
    ids=["two-to-one", "one-or-two-to-three"],
)
def test_the_engine_goes_on_from_files_that_are_its_own(saved, tmp_path, processes, cases):
    """Losses are those of the two ranks; what the engine saves right after loading is the same, byte for byte."""
    root, expected = saved
    if not (root / "s1-on-1").exists():
        other = RunDirectory(root / "s1-on-1")
        reshard_checkpoint(RunDirectory(root / "s1").checkpoint(SAVED_AT), other.checkpoint(SAVED_AT), data=1, zero=2)
        shutil.copyfile(root / "s1" / "run.json", other.run_json)
    jobs = []
    for source, target in cases:
        checkpoint, out = RunDirectory(root / source).checkpoint(SAVED_AT), tmp_path / f"{source}-to-{target}"
        reshard_checkpoint(checkpoint, out, data=processes, zero=int(target[1]), processes=2)
        before, after = verify_checkpoint(checkpoint), verify_checkpoint(out)
        layout = {"tensor": 1, "pipeline": 1, "data": processes, "zero": int(target[1])}
        assert before.model_copy(update={"layout": layout, "world_size": processes, "files": after.files}) == after
        for name in ("model.safetensors", "probe.safetensors"):
            assert after.files[name] == before.files[name]
        jobs.append((target, str(out), tmp_path / "again" / out.name))
    rows = on_ranks(processes, jobs, tmp_path / "rows.json")
    for (source, target), (_, resharded, again) in zip(cases, jobs, strict=True):
        own = {path.name: path.read_bytes() for path in again.glob("optimizer-*")}
        assert len(own) == processes
        assert own == {path.name: path.read_bytes() for path in Path(resharded).glob("optimizer-*")}
        # In bf16 a microbatch of one sequence rounds as any other, but its gradients are added in another order.
        tolerance = 1e-3 if target[0] == "b" else 1e-5
        for found, wanted in zip(rows[str(again)], expected[source[:2]], strict=True):
            assert found[0] == pytest.approx(wanted[0], abs=tolerance), (source, target)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("s1", {"tensor": 2}, "belong to megatron's checkpoints"),
        ("s1", {"zero": 3}, "averages are kept at ZeRO stages 0 to 2"),
        ("b1", {"zero": 0}, "phantom Adam step"),
    ],
)
def test_layouts_that_the_engine_refuses_are_refused(saved, tmp_path, name, options, expected):
    checkpoint = RunDirectory(saved[0] / name).checkpoint(SAVED_AT)
    with pytest.raises(UserError, match=expected):
        reshard_checkpoint(checkpoint, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


if __name__ == "__main__":
    work(*sys.argv[1:])
