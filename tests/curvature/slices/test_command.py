"""The command: against weights put together by hand, by ranks, and with bad input."""

import gc
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ckpt_tools.hf.directory import hf_directory_of
from curvature.slices import corners as corners_of_files
from curvature.slices import measurement
from curvature.slices.corners import Corners
from curvature.slices.plane import SequenceLosses, Walk
from tests.conftest import make_hf_directory
from tests.curvature.conftest import command, make_family
from tests.quant_eval.models import make_model
from tests.runs import ranks, succeed
from train.data.batches import batch
from train.data.corpus import open_corpus

SMALL = ["--grid", "5", "--sequences", "10"]  # in two forward passes


@pytest.fixture(scope="module")
def slice_of(held_out_prefix):
    """Runs the command and returns its exit code."""

    def run(*options) -> int:
        return command("slice", "--data", held_out_prefix, *SMALL, *options)

    return run


NAMES = ("base", "previous", "quantized")


def through(family) -> list[Path | str]:
    names = [word for name in NAMES for word in ("--name", name)]
    return [family.base, family.previous, family.quantized, *names]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, family, slice_of) -> Path:
    """The result directory of the plane through the family, by one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    assert slice_of(*through(family), "--out", out) == 0
    return out


@pytest.fixture
def result(alone) -> dict:
    return json.loads((alone / "result.json").read_text())


class Witness:
    """Weights read file by file, moved in float64, and measured as a model of their own."""

    def __init__(self, family, held_out_prefix, directory):
        self._family, self._directory = family, directory
        self._base, previous = (
            load_file(path / "model.safetensors") for path in (family.base, family.previous)
        )
        quantized = dict(self._base)
        for file in (family.quantized / "dense").glob("*.safetensors"):
            quantized |= load_file(file)
        self._tokens = torch.from_numpy(
            batch(open_corpus(held_out_prefix), step=1, batch_size=10, sequence_length=64, seed=0)
        )
        self.base_P, previous_P, quantized_P = map(self._flat, (self._base, previous, quantized))
        self.spanning = np.stack([previous_P - self.base_P, quantized_P - self.base_P], axis=1)

    def _flat(self, weights):
        return np.concatenate([weights[name].double().numpy().ravel() for name in self._base])

    @torch.no_grad()
    def losses(self, weights_P):
        sizes = [tensor.numel() for tensor in self._base.values()]
        pieces = torch.from_numpy(weights_P).float().split(sizes)
        tensors = {
            name: piece.view_as(self._base[name])
            for name, piece in zip(self._base, pieces, strict=True)
        }
        self._directory.mkdir(exist_ok=True)
        shutil.copy(self._family.base / "config.json", self._directory)
        save_file(tensors, self._directory / "model.safetensors", metadata={"format": "pt"})
        model = AutoModelForCausalLM.from_pretrained(self._directory)
        return np.array([model(row[None], labels=row[None]).loss.item() for row in self._tokens])


def test_losses_and_places_are_those_of_weights_put_together_by_hand(
    tmp_path, result, family, held_out_prefix
):
    witness, measured = Witness(family, held_out_prefix, tmp_path / "witness"), result["measured"]
    q, r = np.linalg.qr(witness.spanning)
    axes = q * np.sign(np.diag(r))
    places = [np.zeros(2), *(axes.T @ direction for direction in witness.spanning.T)]
    weights = [witness.base_P, *(witness.base_P + direction for direction in witness.spanning.T)]
    losses = np.stack([witness.losses(weights_P) for weights_P in weights])
    assert [point["name"] for point in measured["points"]] == list(NAMES)
    for point, place, losses_B in zip(measured["points"], places, losses, strict=True):
        assert [point["x"], point["y"]] == pytest.approx(place, rel=1e-5, abs=1e-5)
        assert point["losses"] == pytest.approx(losses_B, rel=2e-6)
        assert point["loss"] == pytest.approx(losses_B.mean(), rel=1e-6)
        assert point["relative_difference"] <= 1e-6
        paired_B = losses_B - losses[0]
        assert point["increase"] == pytest.approx(paired_B.mean(), abs=1e-5)
        assert point["increase_standard_error"] == pytest.approx(
            paired_B.std(ddof=1) / 10**0.5, abs=1e-5
        )
    grid = measured["grid"]
    for row, column in ((0, 0), (4, 1), (2, 3)):
        weights_P = witness.base_P + axes @ [grid["x"][column], grid["y"][row]]
        assert grid["loss"][row][column] == pytest.approx(
            witness.losses(weights_P).mean(), rel=2e-6
        )
    for axis in "xy":
        reached = [point[axis] for point in measured["points"]]
        assert grid[axis][0] < min(reached)
        assert max(reached) < grid[axis][-1]


def test_the_origin_is_the_base_to_the_bit(result):
    measured = result["measured"]
    grid, base = measured["grid"], measured["points"][0]
    assert base["relative_difference"] == 0.0
    assert grid["loss"][grid["y"].index(0.0)][grid["x"].index(0.0)] == base["loss"]


def test_result_holds_numbers_with_their_conditions(result, alone, held_out_prefix):
    assert list(result) == ["model", "spec", "measured", "environment", "sha256"]
    assert sorted(path.name for path in alone.iterdir()) == ["result.json"]
    spec = result["spec"]
    assert spec["name"] == "slice-quantized"
    assert [point["spec"] for point in spec["plane"]] == [None, None, "rtn-b3-g16"]
    assert all(point["weights_digests"] for point in spec["plane"])
    assert spec["data"]["bin_sha256"] == open_corpus(held_out_prefix).manifest.sha256


def test_two_ranks_find_the_same(tmp_path, result, family, held_out_prefix):
    options = ["slice", *through(family), "--data", held_out_prefix, *SMALL]
    program = ("curvature", *map(str, options), "--out", str(tmp_path / "two"))
    succeed(ranks(2, *program))
    shared = json.loads((tmp_path / "two" / "result.json").read_text())
    assert shared["environment"]["world_size"] == 2
    assert shared["measured"] == result["measured"]


@pytest.mark.stress
@pytest.mark.parametrize("name", ["llama-tied", "smollm3", "olmo", "apertus", "gpt_neox"])
def test_every_architecture_has_a_plane_through_checkpoints(
    tmp_path, slice_of, name, train_prefix, held_out_prefix
):
    family = make_family(make_model(tmp_path / name, name), train_prefix, held_out_prefix)
    assert slice_of(*through(family)[:3]) == 0  # named after their directories
    result = json.loads((family.base / "curvature/slice-rtn-b3-g16/result.json").read_text())
    witness = Witness(family, held_out_prefix, tmp_path / "witness")
    for point, direction in zip(result["measured"]["points"][1:], witness.spanning.T, strict=True):
        assert point["losses"] == pytest.approx(
            witness.losses(witness.base_P + direction), rel=5e-6
        )
        assert np.hypot(point["x"], point["y"]) == pytest.approx(
            np.linalg.norm(direction), rel=1e-5
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--grid", "2"], "'grid'"),
        (["--sequences", "1"], "'sequences'"),
        (["--sequences", "100000"], "100000 are needed; give more text"),
        (["--data", "nowhere/at-all"], "does not exist; make it with"),
        (["--name", "base"], "the points are named base, previous, quantized, base; give --name"),
        (["--device", "tpu"], "--device cannot be 'tpu'; did you mean cpu?"),
    ],
)
def test_bad_options_end_with_nothing_written(slice_of, capsys, tmp_path, family, options, message):
    assert slice_of(*through(family), "--out", tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("within", [".", "quant", "quant/rtn-b3-g16", ".."])
def test_a_result_is_of_the_model_above_it_from_wherever_it_is_named(family, monkeypatch, within):
    monkeypatch.chdir(family.base / within)
    result = Path(os.path.relpath(family.quantized))
    assert hf_directory_of(result).resolve() == family.base.resolve()
    assert hf_directory_of(family.quantized) == family.base


def test_a_name_that_leads_elsewhere_is_refused(slice_of, capsys, family):
    """The result is at curvature/slice-NAME."""
    words = through(family)
    words[-1] = "../elsewhere"
    assert slice_of(*words) == 2
    assert "give names without slash" in capsys.readouterr().err.splitlines()[-1]


def test_weights_that_do_not_belong_together_are_refused(
    slice_of, capsys, tmp_path, family, monkeypatch
):
    def refusal(model, previous=family.previous, quantized=family.quantized) -> str:
        names = ["--name", "base", "--name", "previous", "--name", "quantized"]
        points = [model, previous, quantized, *names]
        assert slice_of(*points, "--out", tmp_path / "out") == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err.splitlines()[-1]

    wider = make_hf_directory(tmp_path / "wider", intermediate_size=96)
    assert "has other parameters than" in refusal(family.base, previous=wider)
    assert "differ from the first" in refusal(family.base, previous=family.base)
    other, bare = make_hf_directory(tmp_path / "other", seed=9), tmp_path / "rtn-b4"
    bare.mkdir()
    moved = other / "quant" / "rtn-b3-g16"
    shutil.copytree(family.quantized, moved)
    with monkeypatch.context() as patch:
        patch.setattr(measurement, "load_hf_model", lambda *_: pytest.fail("loaded before"))
        assert "is of another model than" in refusal(family.base, quantized=moved)
        assert "is neither an HF directory nor a result" in refusal(family.base, quantized=bare)
        with_nothing = family.base / "curvature"
        assert "is neither an HF directory nor" in refusal(family.base, quantized=with_nothing)
    broken = make_hf_directory(tmp_path / "broken")
    model = AutoModelForCausalLM.from_pretrained(broken)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(broken)
    message = f"the weights of {broken} are not finite; give others"
    assert message in refusal(family.base, previous=broken)
    assert message in refusal(broken, quantized=other)


def test_a_point_without_the_loss_of_its_files_is_refused(
    slice_of, capsys, tmp_path, family, monkeypatch
):
    """Put together 5% too far, it has another loss than transformers' reading of its files."""
    exact: Any = Corners.combine

    def further(corners, coefficients, into):
        scaled = [
            1.05 * factor if index == 2 else factor for index, factor in enumerate(coefficients)
        ]
        exact(corners, scaled, into)

    monkeypatch.setattr(Corners, "combine", further)
    assert slice_of(*through(family), "--out", tmp_path / "out") == 2
    assert "the quantized point has loss" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_any_three_models_span_a_plane(tmp_path, slice_of, family, held_out_prefix):
    """Two checkpoints and their average: the plane is that of weights put together by hand."""
    third = make_hf_directory(tmp_path / "third", seed=4)
    out = tmp_path / "out"
    names = [word for name in ("stable end", "annealed", "third") for word in ("--name", name)]
    assert slice_of(family.previous, family.base, third, *names, "--out", out) == 0
    measured = json.loads((out / "result.json").read_text())["measured"]
    weights = [
        np.concatenate([tensor.double().numpy().ravel() for _, tensor in sorted(tensors.items())])
        for path in (family.previous, family.base, third)
        for tensors in [load_file(path / "model.safetensors")]
    ]
    places = np.array([[point["x"], point["y"]] for point in measured["points"]])
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.linalg.norm(places[i] - places[j]) == pytest.approx(
            np.linalg.norm(weights[i] - weights[j]), rel=1e-12
        )
    assert [point["name"] for point in measured["points"]] == ["stable end", "annealed", "third"]


def bytes_of_tensors() -> int:
    """Bytes of all tensors of this process, views and tied ones once."""
    storages = [
        tensor.untyped_storage() for tensor in gc.get_objects() if isinstance(tensor, torch.Tensor)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("kind", ["slice", "pca"])
def test_the_weights_are_in_memory_twice(kind, tmp_path, family, held_out_prefix, monkeypatch):
    """While losses are computed all tensors together are the model and one direction; rows of
    files are read a few at a time. So it is for three models as for six.
    """
    others = [make_hf_directory(tmp_path / str(seed), seed=seed) for seed in range(3, 7)]
    points = [family.previous, family.base, others[0] if kind == "pca" else family.quantized]
    points += [word for path in others[1:] for word in ("--project", path)] if kind == "pca" else []
    weights = sum(
        tensor.numel() * 4 for tensor in load_file(family.base / "model.safetensors").values()
    )
    most = {"grid": 0, "read": 0}
    computed: Any = SequenceLosses.__call__
    read: Any = Corners._rows

    def counting(losses):
        most["grid"] = max(most["grid"], bytes_of_tensors())
        return computed(losses)

    def reading(*words):
        rows_E = read(*words)
        most["read"] = max(most["read"], 3 * 8 * len(rows_E))  # three copies in float64
        return rows_E

    monkeypatch.setattr(corners_of_files, "BYTES_AT_ONCE", 4096)
    monkeypatch.setattr(SequenceLosses, "__call__", counting)
    monkeypatch.setattr(Corners, "_rows", reading)
    gc.collect()
    before = bytes_of_tensors()
    out = tmp_path / "out"
    assert command(kind, *points, "--data", held_out_prefix, *SMALL, "--out", out) == 0
    # beside them the tokens and losses, and buffers of the model
    assert 2 * weights <= most["grid"] - before < 2.2 * weights
    assert 0 < most["read"] <= 4096


def killed_in_the_grid(*arguments: str) -> None:
    """A worker: the command, which kill -9 ends when it has computed three halves of rows."""
    whole, calls = Walk.half_row, itertools.count()

    def killed(walk, y, x):
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(walk, y, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Walk, "half_row", killed)
        command(*arguments)


def test_killed_in_the_grid_it_leaves_nothing_and_starts_again(
    tmp_path, slice_of, family, held_out_prefix, result
):
    out = tmp_path / "out"
    options = [*through(family), "--data", held_out_prefix, *SMALL, "--out", out]
    worker = (killed_in_the_grid.__module__, killed_in_the_grid.__name__, "slice")
    done = ranks(1, "tests.worker", *worker, *map(str, options))
    assert done.returncode == -signal.SIGKILL
    assert "points 3/3" in done.stderr
    assert not out.exists()
    assert slice_of(*through(family), "--out", out) == 0
    assert json.loads((out / "result.json").read_text())["measured"] == result["measured"]
