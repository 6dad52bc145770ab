"""Every figure of a prediction against dense float64 Hessians, and its errors against repetition.

Shapes: P parameters, M microbatches.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch

from base.errors import UserError
from curvature.products.exact import Quadratic
from curvature.products.probes import rademacher
from curvature.step.prediction import UNITS, predict
from tests.curvature.conftest import dense_hessian, random_tokens, tiny_model

BATCHES = 3


class Quadratics:
    """Quadratic losses by microbatch: gradients and Hessians over named slices of one vector."""

    def __init__(self, gradients_MP, hessians_MPP, slices, shapes, cubic=0.0):
        self.gradients_MP, self.hessians_MPP, self.cubic = gradients_MP, hessians_MPP, cubic
        self.slices, self.shapes = slices, shapes
        self.size = gradients_MP.shape[1]

    def flat(self, v):
        v_P = np.zeros(self.size)
        for name, tensor in v.items():
            v_P[self.slices[name]] = tensor.flatten().numpy()
        return v_P

    def evaluate(self, index, v):
        v_P = self.flat(v)
        index %= len(self.gradients_MP)
        hv_P = self.hessians_MPP[index] @ v_P
        dots = {name: float(v_P[place] @ hv_P[place]) for name, place in self.slices.items()}
        return Quadratic(7.0, float(self.gradients_MP[index] @ v_P), dots)

    def moved(self, index, v):
        quadratic, v_P = self.evaluate(index, v), self.flat(v)
        return (
            7.0
            + quadratic.slope
            + math.fsum(quadratic.dots.values()) / 2
            + self.cubic * (index + 1) * float((v_P**3).sum())
        )

    def probe(self, index, seed=0):
        v = {
            name: rademacher(name, 0, shape.numel(), seed=seed, probe=index).double().view(shape)
            for name, shape in self.shapes.items()
        }
        return v, self.evaluate(index, v).dots


class Problem:
    """A tiny OLMo2 with dense Hessians over three linears of both blocks, and a step in them."""

    def __init__(self):
        model = tiny_model()
        dense = [dense_hessian(model, random_tokens(seed=seed)) for seed in range(BATCHES)]
        slices, shapes, position = {}, {}, 0
        kept: list[Any] = []
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")):
                filled = sum(len(place) for place in kept)
                slices[name] = slice(filled, filled + weight.numel())
                kept.append(np.arange(position, position + weight.numel()))
                shapes[name] = weight.shape
            position += weight.numel()
        places = np.concatenate(kept)
        self.hessians_MPP = np.stack(
            [batch.hessian_PP.numpy()[np.ix_(places, places)] for batch in dense]
        )
        self.gradients_MP = np.stack([batch.gradient_P.numpy()[places] for batch in dense])
        self.quadratics = Quadratics(
            self.gradients_MP, self.hessians_MPP, slices, shapes, cubic=0.01
        )
        generator = torch.Generator().manual_seed(3)
        self.delta = {
            name: 0.01 * torch.randn(shape, generator=generator, dtype=torch.float64)
            for name, shape in shapes.items()
        }
        self.places = {
            part: np.concatenate(
                [np.arange(slices[n].start, slices[n].stop) for n in self.delta if layer in n]
            )
            for part, layer in {"whole": ".", "layer0": "layers.0.", "layer1": "layers.1."}.items()
        }

    def predict(self, microbatches=BATCHES, **changes):
        losses = self.quadratics
        given: dict[str, Any] = {"evaluate": losses.evaluate, "loss_moved": losses.moved}
        given |= {"random": losses.probe, "delta": self.delta} | changes
        return predict(**given, microbatches=microbatches)


@pytest.fixture(scope="module")
def problem():
    return Problem()


def parts(result):
    return {"whole": result["whole"], **result["blocks"]}


def exact(values_M):
    """Mean and standard error as numpy has them."""
    return pytest.approx(
        (np.mean(values_M), np.std(values_M, ddof=1) / math.sqrt(len(values_M))), rel=1e-9
    )


def mean_and_error(estimate):
    return estimate["mean"], estimate["standard_error"]


def test_increases_are_those_of_dense_algebra(problem):
    """The loss that is measured has a cubic term: exactly what remains."""
    delta_P = problem.quadratics.flat(problem.delta)
    for part, figures in parts(problem.predict()).items():
        place = problem.places[part]
        step = delta_P[place]
        first = problem.gradients_MP[:, place] @ step
        second = np.array(
            [step @ hessian[np.ix_(place, place)] @ step / 2 for hessian in problem.hessians_MPP]
        )
        cubic = 0.01 * np.arange(1, BATCHES + 1) * (step**3).sum()
        assert mean_and_error(figures["first_order"]) == exact(first)
        assert mean_and_error(figures["second_order"]) == exact(second)
        assert mean_and_error(figures["predicted"]) == exact(first + second)
        assert mean_and_error(figures["measured"]) == exact(first + second + cubic)
        # a difference of losses near 7: rounding
        assert mean_and_error(figures["remainder"]) == pytest.approx(
            exact(cubic).expected, rel=1e-6, abs=1e-14
        )
        assert mean_and_error(figures["curvature"]["along_step"]) == exact(
            2 * second / (step @ step)
        )
        assert (figures["norm"], figures["parameters"]) == (
            pytest.approx(np.linalg.norm(step)),
            len(place),
        )
        expected = (first + second).mean() / (first + second + cubic).mean() - 1
        assert figures["relative_difference"]["mean"] == pytest.approx(expected, rel=1e-6)


def test_the_interaction_is_the_off_diagonal_of_the_hessian(problem):
    delta_P, (first, second) = (
        problem.quadratics.flat(problem.delta),
        [problem.places[f"layer{i}"] for i in (0, 1)],
    )
    between = [
        delta_P[first] @ hessian[np.ix_(first, second)] @ delta_P[second]
        for hessian in problem.hessians_MPP
    ]
    result = problem.predict()
    assert mean_and_error(result["interaction"]["second_order"]) == exact(between)
    # the cubic term does not couple blocks
    assert mean_and_error(result["interaction"]["measured"]) == pytest.approx(
        exact(between).expected, rel=1e-6
    )
    whole = result["whole"]["second_order"]["mean"]
    assert result["interaction"]["share"]["mean"] == pytest.approx(np.mean(between) / whole)


def test_random_signs_average_to_trace_and_weighted_diagonal(problem):
    """600 probes over the same 3 batches; ratios too, each within 4 of its standard errors."""
    result = problem.predict(600)
    delta_P, mean_PP = problem.quadratics.flat(problem.delta), problem.hessians_MPP.mean(0)
    for part, figures in parts(result).items():
        place = problem.places[part]
        step, hessian = delta_P[place], mean_PP[np.ix_(place, place)]
        along = step @ hessian @ step / (step @ step)
        signed = (np.diag(hessian) * step**2).sum() / (step @ step)
        mean = np.trace(hessian) / len(place)
        for estimate, value in (
            (figures["curvature"]["signed"], signed),
            (figures["curvature"]["mean"], mean),
            (figures["ratios"]["step_to_mean"], along / mean),
            (figures["ratios"]["step_to_signed"], along / signed),
            (figures["ratios"]["signed_to_mean"], signed / mean),
        ):
            assert abs(estimate["mean"] - value) < 4 * estimate["standard_error"]
        for figure, value in (("signed", signed), ("mean", mean)):  # or being near says little
            assert figures["curvature"][figure]["standard_error"] < 0.3 * abs(value)


def test_an_aligned_step_is_told_from_one_along_sharp_weights():
    """H all ones: errors add up. One large entry where the step is large: it moves most."""
    size = 8
    ones, sharp = np.ones((size, size)), np.eye(size)
    sharp[0, 0] = 100.0
    slices = {"model.layers.0.mlp.up_proj.weight": slice(0, size)}
    name = next(iter(slices))
    along_one = torch.full((size,), 1e-3, dtype=torch.float64)
    along_one[0] = 1.0
    for hessian, delta, signed, aligned in (
        (ones, torch.ones(size, dtype=torch.float64), 1.0, float(size)),
        (sharp, along_one, 100 / (107 / size), 1.0),
    ):
        quadratics = Quadratics(
            np.zeros((1, size)), hessian[None], slices, {name: torch.Size([size])}
        )
        result = predict(
            quadratics.evaluate, quadratics.moved, {name: delta}, quadratics.probe, microbatches=400
        )
        ratios = result["whole"]["ratios"]
        assert ratios["signed_to_mean"]["mean"] == pytest.approx(signed, rel=0.15)
        assert ratios["step_to_signed"]["mean"] == pytest.approx(aligned, rel=0.15)
        assert ratios["step_to_mean"]["mean"] == pytest.approx(signed * aligned, rel=0.15)


def test_intervals_of_ratios_cover():
    """Microbatches drawn 400 times: 95% intervals of predicted / measured - 1 and of a ratio."""
    name, generator = "model.layers.0.mlp.up_proj.weight", np.random.default_rng(0)
    delta = {name: torch.ones(2, dtype=torch.float64)}
    covered = np.zeros(2)
    for _ in range(400):
        common_M = generator.gamma(8.0, size=(24, 1))
        slopes_M, curvatures_M, traces_M = (
            common_M * generator.gamma(20.0, 1 / 20, size=(24, 3))
        ).T

        def evaluate(index, v, s=slopes_M, c=curvatures_M, seen=[0, 0]):  # noqa: B006
            seen[:] = [index, seen[1] + 1 if seen[0] == index else 1]
            dots = (c, 2 * c, 2 * c)[seen[1] - 1]  # signed step, step, step in its block
            return Quadratic(0.0, float(s[index]), {name: float(dots[index])})

        def random(index, t=traces_M):
            return delta, {name: float(t[index])}

        def moved(index, v, s=slopes_M, c=curvatures_M):
            return float(1.25 * (s + c)[index]) if v else 0.0

        result = predict(evaluate, moved, delta, random, microbatches=24)["whole"]
        for number, (estimate, truth) in enumerate(
            ((result["relative_difference"], -0.2), (result["ratios"]["step_to_mean"], 2.0))
        ):
            low, high = estimate["interval"]
            covered[number] += low - 1e-12 <= truth <= high + 1e-12
    # measured is 1.25 times predicted on every microbatch: paired, there is no error at all
    assert covered[0] == 400
    assert 0.92 <= covered[1] / 400 <= 0.98


def test_every_figure_has_a_unit(problem):
    result = problem.predict()
    flat = {"loss"} | {f"interaction.{key}" for key in result["interaction"]}
    for key, value in result["whole"].items():
        flat |= {f"{key}.{inner}" for inner in value} if key in ("curvature", "ratios") else {key}
    assert flat == UNITS.keys()


def test_what_is_not_finite_is_refused(problem):
    with pytest.raises(
        UserError, match="microbatch 0: measured of the step in all blocks is not finite"
    ):
        problem.predict(loss_moved=lambda _, v: math.nan if v else 1.0)


def test_an_increase_of_nothing_has_no_relative_difference(problem):
    result = problem.predict(loss_moved=lambda *_: 7.0)
    assert result["whole"]["relative_difference"] is None
