"""Checkpoints of the DeepSpeed engine: resumed, written late, at another world size or stage."""

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from base.files import sha256_of
from tests.interpreter import interpreter
from tests.runs import environment, python, ranks
from tests.train.deepspeed_attempts import named
from tests.train.test_deepspeed import plain_model
from tests.waiting import HANG_SECONDS

MODULE = "tests.train.deepspeed_attempts"


def regathered(directory: Path) -> dict[str, torch.Tensor]:
    """KIND/NAME -> the whole flat tensor, its ranges sorted by where they start."""
    ranges: dict[str, list] = {}
    for path in directory.glob("optimizer-*"):
        with safe_open(path, "pt") as file:
            starts = json.loads(file.metadata()["state"])["starts"]
            for key in file.keys():  # noqa: SIM118  it is not a dictionary
                ranges.setdefault(key, []).append(
                    (starts[key.partition("/")[2]], file.get_tensor(key))
                )
    return {
        key: torch.cat([part for _, part in sorted(parts, key=lambda each: each[0])])
        for key, parts in ranges.items()
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in directory.iterdir()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict]:
    """Directories one, two and back, and what the three workers report."""
    root = tmp_path_factory.mktemp("checkpoints")
    places = {name: str(root / name) for name in ("one", "two", "back")}
    commands = (
        (python, ("save_at_one_process", places["one"])),
        (partial(ranks, 2), ("go_through_two_processes", places["two"], places["one"])),
        (python, ("load_in_one_process", places["back"], places["two"])),
    )
    report = {}
    for start, (worker, *arguments) in commands:
        done = start(MODULE, worker, *arguments)
        assert done.returncode == 0, done.stderr[-3000:]
        report[worker] = json.loads((Path(arguments[0]) / "report.json").read_text())
    return root, report


@pytest.mark.parametrize("name", ["s1", "s2", "b1", "b2"])
def test_resuming_and_rejected_steps_leave_every_bit(saved, name):
    """The uninterrupted attempt rejected two steps; the resumed one had other weights at first."""
    root, report = saved
    rows = report["go_through_two_processes"][name]
    assert rows["rows"] == rows["resumed"]
    assert hashes(root / "two" / name / "end") == hashes(root / "two" / name / "resumed")
    assert hashes(root / "two" / name / "end") != hashes(root / "two" / name / "sync")


@pytest.mark.parametrize("name", ["s1", "s2", "b1", "b2"])
def test_a_snapshot_written_after_further_steps_holds_its_own_step(saved, name):
    directory = saved[0] / "two" / name
    assert hashes(directory / "late") == hashes(directory / "sync")
    assert (directory / "weights" / "model.safetensors").read_bytes() == (
        directory / "end" / "model.safetensors"
    ).read_bytes()
    assert [path.name for path in (directory / "weights").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("name", ["s1", "s2", "b1", "b2"])
def test_two_processes_go_on_as_one(saved, name):
    """Weights, moments and slots are the same bits; bf16 then differs by its rounding."""
    root, report = saved
    before, after = (
        regathered(root / "two" / name / "sync"),
        regathered(root / "back" / name / "resaved"),
    )
    assert same(before, after)
    rows = report["go_through_two_processes"][name]["rows"]
    for row, expected in zip(report["load_in_one_process"][name], rows, strict=True):
        assert row[0] == pytest.approx(expected[0], abs=1e-5 if name[0] == "s" else 1e-3)


@pytest.mark.parametrize(("name", "source"), [("s1", "s1"), ("s2", "s2"), ("s2", "s1")])
def test_one_process_goes_on_as_two_and_at_another_stage(saved, name, source):
    root, report = saved
    after = regathered(root / "two" / f"from-{source}" / name / "resaved")
    assert same(regathered(root / "one" / source / "sync"), after)
    rows = report["go_through_two_processes"][f"{name}-from-{source}"]
    for row, expected in zip(rows, report["save_at_one_process"][source], strict=True):
        assert row[0] == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.parametrize("name", ["s1", "s2", "b1"])
def test_slots_and_weights_are_those_of_the_engine(saved, name):
    """Every parameter is once on the ranks, its slots beside it, and the model is its cast."""
    from train.averages import slot_names

    root, _ = saved
    state = regathered(root / "two" / name / "sync")
    model = load_file(root / "two" / name / "sync" / "model.safetensors")
    whole = dict(plain_model(named(name)).named_parameters())
    slots = slot_names(named(name))
    assert len(slots) > 1
    assert len(state) == len(whole) * (3 + len(slots))
    assert model.keys() == whole.keys()
    for key, weight in model.items():
        assert weight.dtype == (torch.float32 if name[0] == "s" else torch.bfloat16)
        assert torch.equal(weight.flatten(), state[f"weights/{key}"].to(weight.dtype))
        for index, slot in enumerate(slots):
            assert torch.equal(state[f"slot.{slot}/{key}"], state[f"weights/{key}"] * (index + 2))


@pytest.mark.parametrize("name", ["s1", "s2", "b1", "b2"])
def test_published_weights_are_what_the_model_computes_with(saved, name):
    """Halving is exact in every precision."""
    directory = saved[0] / "two" / name
    halved, model = (
        load_file(directory / place / "model.safetensors") for place in ("halved", "resumed")
    )
    assert all(torch.equal(halved[key], model[key] * 0.5) for key in model)


def test_deepspeeds_own_conversion_finds_the_same_state(saved, tmp_path):
    """Its checkpoint of the same moment through its ds_to_universal, parameter by parameter."""
    root, _ = saved
    command = [
        interpreter(),
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--inject_missing_state",
    ]
    paths = [
        "--input_folder",
        str(root / "two" / "own" / "step"),
        "--output_folder",
        str(tmp_path / "universal"),
    ]
    done = subprocess.run(
        [*command, *paths, "--num_extract_workers", "1", "--num_merge_workers", "1"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    state = regathered(root / "two" / "s1" / "sync")
    names = {key.partition("/")[2] for key in state}
    assert {
        path.name for path in (tmp_path / "universal" / "zero").iterdir() if path.is_dir()
    } == names
    for name in names:
        for ours, theirs in (
            ("weights", "fp32"),
            ("exp_avg", "exp_avg"),
            ("exp_avg_sq", "exp_avg_sq"),
        ):
            path = tmp_path / "universal" / "zero" / name / f"{theirs}.pt"
            # DeepSpeed's converter made it in this test; it pickles more than tensors
            whole = torch.load(path, weights_only=False)["param"]
            assert torch.equal(whole.flatten(), state[f"{ours}/{name}"]), (ours, name)


def test_what_cannot_be_loaded_is_refused(saved):
    two = saved[1]["go_through_two_processes"]
    assert "holds 0 files of optimizer state, not one of every rank" in two["no checkpoint"]
    assert "holds 1 files of optimizer state, not one of every rank" in two["one of two files"]
