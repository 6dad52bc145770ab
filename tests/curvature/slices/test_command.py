"""The command: against weights put together by hand, by ranks, and with bad input."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from curvature.slices import measurement
from curvature.step.quantized import QuantizationStep
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

    def run(model, *options) -> int:
        return command("slice", model, "--data", held_out_prefix, *SMALL, *options)

    return run


def through(family) -> list[Path | str]:
    return ["--previous", family.previous, "--quantized", family.quantized]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, family, slice_of) -> Path:
    """The result directory of the plane through the family, by one process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    assert slice_of(family.base, *through(family), "--out", out) == 0
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
    assert [point["name"] for point in measured["points"]] == ["base", "previous", "quantized"]
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
    assert (spec["name"], spec["plane"]) == ("slice-rtn-b3-g16", "checkpoints")
    assert spec["quantized"]["spec"] == "rtn-b3-g16"
    assert spec["data"]["bin_sha256"] == open_corpus(held_out_prefix).manifest.sha256


def test_two_ranks_find_the_same(tmp_path, result, family, held_out_prefix):
    options = ["slice", family.base, "--data", held_out_prefix, *SMALL, *through(family)]
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
    assert slice_of(family.base, *through(family)) == 0
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
        (["--device", "tpu"], "--device cannot be 'tpu'; did you mean cpu?"),
    ],
)
def test_bad_options_end_with_nothing_written(slice_of, capsys, tmp_path, family, options, message):
    assert slice_of(family.base, *through(family), "--out", tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_weights_that_do_not_belong_together_are_refused(
    slice_of, capsys, tmp_path, family, monkeypatch
):
    def refusal(model, previous=family.previous, quantized=family.quantized) -> str:
        points = ["--previous", previous, "--quantized", quantized]
        assert slice_of(model, *points, "--out", tmp_path / "out") == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err.splitlines()[-1]

    wider = make_hf_directory(tmp_path / "wider", intermediate_size=96)
    assert "has other parameters than" in refusal(family.base, previous=wider)
    assert "differ from the model" in refusal(family.base, previous=family.base)
    other, bare = make_hf_directory(tmp_path / "other", seed=9), tmp_path / "rtn-b4"
    bare.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(measurement, "load_hf_model", lambda *_: pytest.fail("loaded before"))
        assert "is of another model than" in refusal(other)
        assert "result.json does not exist" in refusal(family.base, quantized=bare)
    broken = make_hf_directory(tmp_path / "broken")
    model = AutoModelForCausalLM.from_pretrained(broken)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    model.save_pretrained(broken)
    assert f"loss at {broken} is nan; give weights that are finite" in refusal(
        family.base, previous=broken
    )
    delta: Any = QuantizationStep.delta

    def longer(step, name):
        exact = delta(step, name)
        return None if exact is None else 1.05 * exact

    monkeypatch.setattr(QuantizationStep, "delta", longer)
    assert "the quantized point has loss" in refusal(family.base)
