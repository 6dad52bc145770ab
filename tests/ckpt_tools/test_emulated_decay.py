"""Averages that emulate a decay, against the trajectory computed again at the decayed rates."""

import json
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from ckpt_tools.averaging import average_models, describe
from ckpt_tools.emulated_decay import decay_coefficients
from tests.ckpt_tools.checkpoints import seal_export
from tests.conftest import make_hf_directory
from train.optimizers.adamw import AdamW
from train.run.optimization import Anneal, ConstantPhase, ScheduleConfig, Shape
from train.run.schedules import learning_rate

SHAPES = get_args(Shape)
START, END = 40, 100  # of the decay
UNEVEN = (40, 43, 60, 90, 91, 100)
RATE = 0.1

# Shapes: T updates, D parameters.
Array = NDArray[np.float64]


def rates(shape: Shape | None) -> Array:
    """The learning rate of each update after START, by a run's schedule; None: without anneal."""
    anneal = Anneal(start_step=START, shape=shape) if shape else None
    schedule = ScheduleConfig(warmup_tokens=0, phase=ConstantPhase(), anneal=anneal)
    run: Any = SimpleNamespace(
        tokens_at=int, schedule=schedule, optimizer=AdamW(peak_lr=RATE), total_steps=END
    )
    return np.array([learning_rate(run, step) for step in range(START + 1, END + 1)])


def descend(rates_T: Array, noise_TD: Array) -> tuple[dict[int, Array], Array]:
    """Weights by step, and the gradients, of SGD on a quadratic with noise."""
    curvature_D = np.linspace(0.1, 5, noise_TD.shape[1])
    weights_D, gradients = np.ones_like(curvature_D), []
    weights_by_step = {START: weights_D}
    for step, (rate, noise_D) in enumerate(zip(rates_T, noise_TD, strict=True), START + 1):
        gradients.append(curvature_D * weights_D + noise_D)
        weights_D = weights_D - rate * gradients[-1]
        weights_by_step[step] = weights_D
    return weights_by_step, np.array(gradients)


def merged(weights_by_step: dict[int, Array], steps: tuple[int, ...], shape: Shape) -> Array:
    coefficients = np.array(decay_coefficients(steps, shape))
    return coefficients @ np.array([weights_by_step[step] for step in steps])


@pytest.fixture(scope="module")
def trajectory() -> tuple[dict[int, Array], Array]:
    noise_TD = np.random.default_rng(0).normal(size=(END - START, 7))
    return descend(rates(None), noise_TD)


@pytest.mark.parametrize("shape", SHAPES)
def test_with_every_step_the_rates_are_those_of_an_anneal(trajectory, shape):
    """Its gradients are those recorded at the constant rate: all that an average can know."""
    weights_by_step, gradients_TD = trajectory
    decayed_D = weights_by_step[START] - rates(shape) @ gradients_TD
    every_step = tuple(range(START, END + 1))
    np.testing.assert_allclose(merged(weights_by_step, every_step, shape), decayed_D, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_uneven_steps_are_weighed_by_their_updates(shape):
    """Equal gradients between two checkpoints, so that these hold all that is lost between."""
    random = np.random.default_rng(1)
    gradients_TD = np.concatenate(
        [
            np.broadcast_to(random.normal(size=7), (stop - start, 7))
            for start, stop in pairwise(UNEVEN)
        ]
    )
    moves_TD = np.cumsum(RATE * gradients_TD, axis=0)
    weights_by_step = {step: 1 - moves_TD[step - START - 1] for step in UNEVEN[1:]}
    weights_by_step[START] = np.ones(7)
    decayed_D = 1 - rates(shape) @ gradients_TD
    np.testing.assert_allclose(merged(weights_by_step, UNEVEN, shape), decayed_D, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_more_checkpoints_come_closer_to_the_anneal(trajectory, shape):
    weights_by_step, gradients_TD = trajectory
    decayed_D = weights_by_step[START] - rates(shape) @ gradients_TD
    distances = [
        float(np.linalg.norm(merged(weights_by_step, steps, shape) - decayed_D))
        for steps in (tuple(range(START, END + 1, every)) for every in (30, 10, 2))
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 0.2 * distances[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_coefficients_are_shares(shape):
    random = np.random.default_rng(2)
    for count in (2, 3, 12):
        steps = sorted(random.choice(3000, count, replace=False).tolist())
        coefficients = decay_coefficients(steps, shape)
        assert min(coefficients) >= 0
        assert abs(float(sum(map(Fraction, coefficients))) - 1) < 1e-15, steps


def test_a_linear_decay_is_the_trapezoidal_mean():
    """By hand: over equal distances all weigh the same, the ends half, but for the last update."""
    steps = (0, 1000, 2000, 3000, 4000)
    expected = [1 / 8, 1 / 4, 1 / 4, 1 / 4, 1 / 8]
    assert decay_coefficients(steps, "linear") == pytest.approx(expected, abs=1 / 4000)


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> list[Path]:
    """Random models with the lineage of a run."""
    root = tmp_path_factory.mktemp("exports")
    paths = [make_hf_directory(root / f"step{step}", seed=step) for step in UNEVEN]
    for step, path in zip(UNEVEN, paths, strict=True):
        seal_export(path, kind="export", run="stable", fingerprint="ab", step=step, tokens=2 * step)
    return paths


def test_the_average_is_numpys_and_says_what_it_is(exports, tmp_path):
    """Bit for bit the fp32 sum in order of products with the coefficients in fp32."""
    average_models(tmp_path / "out", exports, decay="sqrt")
    lineage = json.loads((tmp_path / "out" / "lineage.json").read_text())
    coefficients = lineage["coefficients"]
    assert coefficients == pytest.approx(decay_coefficients(UNEVEN, "sqrt"), rel=1e-15)
    assert (lineage["steps"], lineage["run"], lineage["step"]) == (list(UNEVEN), "stable", 100)
    words = "decay-equivalent average (sqrt) of steps 40, 43, 60, 90, 91 and 100"
    assert describe(lineage) == words

    average = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    inputs = [safetensors.numpy.load_file(path / "model.safetensors") for path in exports]
    for name, weight in average.items():
        total = np.full_like(weight, -0.0)
        for each, coefficient in zip(inputs, coefficients, strict=True):
            total += each[name] * np.float32(coefficient)
        assert weight.tobytes() == total.tobytes(), name
