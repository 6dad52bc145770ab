"""Checkpoints of the DeepSpeed engine: resumed, written late, at another world size or stage."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file

from base.errors import UserError
from base.files import sha256_of, write_json
from tests.conftest import widths
from tests.interpreter import interpreter
from tests.runs import draw_weights, execute, on_ranks, save, succeed
from tests.train.plain import model_of_family
from tests.train.test_deepspeed import PLAINLM, batch_of, small_run
from train.averages import slot_names
from train.data.batches import Batch
from train.distributed import start
from train.engine import StepResult
from train.model.config import ModelConfig
from train.perturbing import train_step_of
from train.run.config import RunConfig
from train.run.directory import MODEL_INDEX
from train.run.optimization import Ema, Lawa
from train.run.perturbation import Qat
from train.run.schedules import learning_rate

SAVED_AT, LAST = 2, 5
AVERAGES = (Ema(decay=0.9), Lawa(interval_steps=1, window=2))
# Three ranks divide none of its sizes. The last one has no number of a norm, and norms are all of
# a decay group.
ODD: dict[str, Any] = {
    "model": ModelConfig(**widths(4, 5, 2, 2, vocab_size=67, num_hidden_layers=1)),
    "optimizer": PLAINLM,
    "batch_size": 6,
    "perturbation": Qat(spec="rtn-b3-perchannel", from_step=LAST - 1),
}


def named(name: str) -> RunConfig:
    """The run of a name: s1 is ZeRO stage 1 in fp32 with averages, b2 stage 2 in bf16."""
    return small_run(
        name,
        stage=int(name[1]),
        precision="bf16" if name[0] == "b" else "fp32",
        averages=AVERAGES,
        total_steps=LAST,
        **(ODD if name[0] == "o" else {}),
    )


class Attempt:
    """One engine and what it does, on every rank."""

    def __init__(self, name: str, root: Path) -> None:
        from train.deepspeed.engine import DeepSpeedEngine

        device = torch.device("cpu") if dist.is_initialized() else start()
        self.run, self.root = named(name), root
        self.slots = slot_names(self.run)
        self.engine = DeepSpeedEngine(self.run, device)
        draw_weights(self.engine, self.run)

    def train(self, first: int, last: int) -> list[list[float]]:
        return [
            list(
                train_step_of(self.run, self.engine, step)(
                    batch_of(step).first(self.run.batch_size).of_replica(self.engine.replica),
                    learning_rate(self.run, step),
                    StepResult.is_finite,
                ).figures.values()
            )
            for step in range(first, last + 1)
        ]

    def fill_slots(self) -> None:
        """Slot k becomes k + 2 times the weights."""
        for index, name in enumerate(self.slots):
            for weights, slot in zip(self.engine.weights(), self.engine.slot(name), strict=True):
                slot.copy_(weights).mul_(index + 2)

    def snapshot(self, name: str):
        directory = self.root / self.run.name / name
        directory.mkdir(parents=True, exist_ok=True)
        return self.engine.snapshot(directory, weights_only=False)

    def save(self, name: str, weights_only: bool = False) -> None:
        directory = self.root / self.run.name / name
        names = save(self.engine, directory, weights_only=weights_only)
        assert set(names) <= {path.name for path in directory.iterdir()}

    def reject_steps(self) -> None:
        """A step that is refused, and one whose gradient is not finite."""
        other = Batch.of((batch_of(99).tokens_BS + 1) % 64).of_replica(self.engine.replica)
        self.engine.train_step(other, 1.0, lambda _: False)

        def overflow(_module, _inputs, output):
            return tuple(losses * float("nan") for losses in output)

        hook = self.engine._engine.module.register_forward_hook(overflow)
        overflowed = self.engine.train_step(other, 1.0, StepResult.is_finite)
        hook.remove()
        assert not overflowed.is_finite()

    def refusal(self, source: Path) -> str:
        try:
            self.engine.load(source)
        except UserError as error:
            return str(error)
        return ""


def save_at_one_process(root: Path) -> dict:
    """Worker: runs in one process, saved on their way."""
    report = {}
    for name in ("s1", "s2", "o1"):
        attempt = Attempt(name, root)
        attempt.train(1, SAVED_AT)
        attempt.fill_slots()
        attempt.save("sync")
        report[name] = attempt.train(SAVED_AT + 1, LAST)
    attempt.engine.close()
    return report


def go_through_two_processes(root: Path, single: Path) -> dict:
    """Save, continue, resume; then load what one process saved, and what must be refused."""
    report: dict = {}
    for name in ("s1", "s2", "s3", "b1", "b2"):
        attempt = Attempt(name, root)
        attempt.train(1, SAVED_AT)
        attempt.fill_slots()
        attempt.save("sync")
        if name == "s1":
            attempt.engine._engine.save_checkpoint(str(root / "own"), tag="step", save_latest=False)
        late = attempt.snapshot("late")
        rows = attempt.train(SAVED_AT + 1, SAVED_AT + 2)
        attempt.reject_steps()
        rows += attempt.train(SAVED_AT + 3, LAST)
        late.write()
        late.seal()
        attempt.save("end")
        attempt.save("weights", weights_only=True)
        resumed = Attempt(name, root)
        resumed.train(1, 1)
        resumed.engine.load(root / name / "sync")
        report[name] = {"rows": rows, "resumed": resumed.train(SAVED_AT + 1, LAST)}
        resumed.save("resumed")
        for weights in resumed.engine.weights():
            weights.mul_(0.5)
        resumed.engine.publish_weights()
        resumed.save("halved", weights_only=True)
    for name, source in (("s1", "s1"), ("s2", "s2"), ("s2", "s1"), ("s3", "s1")):
        attempt = Attempt(name, root / f"from-{source}")
        attempt.engine.load(single / source / "sync")
        attempt.save("resaved")
        report[f"{name}-from-{source}"] = attempt.train(SAVED_AT + 1, LAST)
    report["no checkpoint"] = attempt.refusal(single)
    torn = root / "torn"
    if dist.get_rank() == 0:
        torn.mkdir()
        shutil.copy(root / "s1" / "sync" / "optimizer-00000-of-00002.safetensors", torn)
    dist.barrier()
    report["one of two files"] = attempt.refusal(torn)
    attempt.engine.close()
    return report


def go_through_three_processes(root: Path, single: Path) -> dict:
    """Worker: three ranks do not divide the sizes of parameters."""
    attempt = Attempt("o3", root)
    rows = attempt.train(1, SAVED_AT)
    attempt.fill_slots()
    attempt.save("sync")
    rows += attempt.train(SAVED_AT + 1, LAST)
    attempt.engine.load(single / "o1" / "sync")
    attempt.save("resaved")
    resumed = attempt.train(SAVED_AT + 1, LAST)
    attempt.engine.close()
    return {"rows": rows, "resumed": resumed}


def load_in_one_process(root: Path, two: Path, three: Path) -> dict:
    """Worker: what several processes saved resumes in one."""
    report: dict = {}
    for name in ("s1", "s2", "s3", "b1", "b2", "o3"):
        attempt = Attempt(name, root)
        attempt.engine.load((three if name == "o3" else two) / name / "sync")
        attempt.save("resaved")
        report[name] = attempt.train(SAVED_AT + 1, LAST)
    attempt.engine.close()
    return report


def write_report(worker: str, out: str, *others: str) -> None:
    """Worker, on every rank: OUT/report.json is what one of those above returns."""
    write_json(Path(out) / "report.json", globals()[worker](Path(out), *map(Path, others)))


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


def whole_model(directory: Path) -> dict[str, torch.Tensor]:
    """Every weight, from the file that the index has it in."""
    files = json.loads((directory / MODEL_INDEX).read_text())["weight_map"]
    return {key: load_file(directory / file)[key] for key, file in files.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in directory.iterdir()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict]:
    """Directories one, two, three and back, and what the workers report."""
    root, report = tmp_path_factory.mktemp("checkpoints"), {}
    one, two, three, back = (root / name for name in ("one", "two", "three", "back"))
    for processes, worker, *directories in (
        (1, save_at_one_process, one),
        (2, go_through_two_processes, two, one),
        (3, go_through_three_processes, three, one),
        (1, load_in_one_process, back, two, three),
    ):
        on_ranks(processes, write_report, worker.__name__, *directories)
        report[worker.__name__] = json.loads((directories[0] / "report.json").read_text())
    return root, report


@pytest.mark.parametrize("name", ["s1", "s2", "s3", "b1", "b2"])
def test_resuming_and_rejected_steps_leave_every_bit(saved, name):
    """The uninterrupted attempt rejected two steps; the resumed one had other weights at first."""
    root, report = saved
    rows = report["go_through_two_processes"][name]
    assert rows["rows"] == rows["resumed"]
    assert hashes(root / "two" / name / "end") == hashes(root / "two" / name / "resumed")
    assert hashes(root / "two" / name / "end") != hashes(root / "two" / name / "sync")


@pytest.mark.parametrize("name", ["s1", "s2", "s3", "b1", "b2"])
def test_a_snapshot_written_after_further_steps_holds_its_own_step(saved, name):
    directory = saved[0] / "two" / name
    assert hashes(directory / "late") == hashes(directory / "sync")
    alone = sorted((directory / "weights").iterdir())
    names = [f"model-0000{rank}-of-00002.safetensors" for rank in (1, 2)]
    assert [path.name for path in alone] == [*names, MODEL_INDEX]
    for path in alone:
        assert path.read_bytes() == (directory / "end" / path.name).read_bytes()
    # The ranks write about the same, and transformers finds all of it by the index.
    assert alone[0].stat().st_size == pytest.approx(alone[1].stat().st_size, rel=0.1)


@pytest.mark.parametrize("name", ["s1", "s2", "s3", "b1", "b2"])
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


@pytest.mark.parametrize(
    ("name", "source"), [("s1", "s1"), ("s2", "s2"), ("s2", "s1"), ("s3", "s1")]
)
def test_one_process_goes_on_as_two_and_at_another_stage(saved, name, source):
    root, report = saved
    after = regathered(root / "two" / f"from-{source}" / name / "resaved")
    assert same(regathered(root / "one" / source / "sync"), after)
    rows = report["go_through_two_processes"][f"{name}-from-{source}"]
    for row, expected in zip(rows, report["save_at_one_process"][source], strict=True):
        assert row[0] == pytest.approx(expected[0], abs=1e-5)


def test_three_ranks_that_divide_no_size_train_as_one(saved):
    """Padding enters neither figures nor rounded weights nor files; one process resumes."""
    root, report = saved
    sync = root / "three" / "o3" / "sync"
    state, model = regathered(sync), whole_model(sync)
    with safe_open(sync / "optimizer-00002-of-00003.safetensors", "pt") as file:
        held = {key.partition("/")[2] for key in file.keys()}  # noqa: SIM118  as above
    assert held == {name for name in model if "norm" not in name}
    for name, weight in model.items():
        assert torch.equal(weight.flatten(), state[f"weights/{name}"]), name
    assert same(regathered(root / "back" / "o3" / "resaved"), state)
    resaved = regathered(root / "three" / "o3" / "resaved")
    assert same(resaved, regathered(root / "one" / "o1" / "sync"))

    three = report["go_through_three_processes"]
    expected = report["save_at_one_process"]["o1"]
    for rows in (three["rows"][SAVED_AT:], three["resumed"], report["load_in_one_process"]["o3"]):
        assert rows == [pytest.approx(row, abs=1e-5) for row in expected]


@pytest.mark.parametrize("name", ["s1", "s2", "s3", "b1"])
def test_slots_and_weights_are_those_of_the_engine(saved, name):
    """Every parameter is once on the ranks, its slots beside it, and the model is its cast."""
    root, _ = saved
    state = regathered(root / "two" / name / "sync")
    model = whole_model(root / "two" / name / "sync")
    whole = dict(model_of_family(named(name)).named_parameters())
    slots = slot_names(named(name))
    assert len(slots) > 1
    assert len(state) == len(whole) * (3 + len(slots))
    assert model.keys() == whole.keys()
    for key, weight in model.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight.flatten(), state[f"weights/{key}"].to(weight.dtype))
        for index, slot in enumerate(slots):
            assert torch.equal(state[f"slot.{slot}/{key}"], state[f"weights/{key}"] * (index + 2))


@pytest.mark.parametrize("name", ["s1", "s2", "s3", "b1", "b2"])
def test_published_weights_are_what_the_model_computes_with(saved, name):
    """Halving is exact in every precision."""
    directory = saved[0] / "two" / name
    halved, model = (whole_model(directory / kind) for kind in ("halved", "resumed"))
    assert all(torch.equal(halved[key], model[key] * 0.5) for key in model)


def test_deepspeeds_own_conversion_finds_the_same_state(saved, tmp_path):
    """Its checkpoint of the same moment through its ds_to_universal, parameter by parameter."""
    root, _ = saved
    command = [interpreter(), "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(root / "two" / "own" / "step")]
    command += ["--output_folder", str(tmp_path / "universal"), "--inject_missing_state"]
    succeed(execute([*command, "--num_extract_workers", "1", "--num_merge_workers", "1"]))
    state = regathered(root / "two" / "s1" / "sync")
    names = {key.partition("/")[2] for key in state}
    converted = tmp_path / "universal" / "zero"
    # DeepSpeed's names are of the module that it was given, which wraps that of transformers.
    written = {path.name for path in converted.iterdir() if path.is_dir()}
    assert written == {f"model.{name}" for name in names}
    for name in names:
        for ours in ("weights", "exp_avg", "exp_avg_sq"):
            path = converted / f"model.{name}" / f"{'fp32' if ours == 'weights' else ours}.pt"
            # DeepSpeed's converter made it in this test; it pickles more than tensors
            whole = torch.load(path, weights_only=False)["param"]
            assert torch.equal(whole.flatten(), state[f"{ours}/{name}"]), (ours, name)


def test_what_cannot_be_loaded_is_refused(saved):
    two = saved[1]["go_through_two_processes"]
    assert "holds 0 files of optimizer state, not one of every rank" in two["no checkpoint"]
    assert "holds 1 files of optimizer state, not one of every rank" in two["one of two files"]
