"""A trained model: what second order predicts of 3, 4 and 8 bits, and the order of the rest."""

import itertools
import math
from typing import Any

import pytest

from curvature.products.probes import rademacher
from curvature.step.prediction import predict
from tests.curvature.step.conftest import rounded_steps

MICROBATCHES = 4


@pytest.fixture(scope="module")
def predictions(trained) -> dict[int, dict[str, Any]]:
    """By bits."""
    line = trained.line

    def random(index):
        v = {
            name: rademacher(name, 0, weight.numel(), seed=0, probe=index).double().view_as(weight)
            for name, weight in line.weights.items()
        }
        return v, line.evaluate(index, v).dots

    return {
        bits: predict(
            line.evaluate,
            line.moved,
            rounded_steps(line.model, bits),
            random,
            microbatches=MICROBATCHES,
        )
        for bits in (3, 4, 8)
    }


def test_the_model_has_learnt(trained):
    """The chain's entropy is near 1.3 nats: four choices, two of them likelier in some columns."""
    assert trained.loss < 0.55 * trained.loss_before


@pytest.mark.parametrize("bits", [4, 8])
def test_second_order_predicts_four_and_eight_bits(predictions, bits):
    whole = predictions[bits]["whole"]
    assert abs(whole["relative_difference"]["mean"]) < 0.15
    for part in (
        whole,
        *predictions[bits]["blocks"].values(),
    ):  # of a block, increases cancel: told by their size
        assert abs(part["remainder"]["mean"]) < 0.15 * part["second_order"]["mean"]


def test_the_remainder_shrinks_faster_than_the_second_order(predictions):
    """Third order beside second: as the size of the rounding, but for its sign."""
    relative = {}
    for bits, prediction in predictions.items():
        values = prediction["whole"]["per_microbatch"]
        remainders = sum(abs(value) for value in values["remainder"])
        relative[bits] = remainders / sum(values["second_order"]) / prediction["whole"]["norm"]
    assert relative[3] == pytest.approx(relative[4], rel=0.7)
    assert relative[8] == pytest.approx(relative[4], rel=0.7)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_remainder_is_of_third_order(trained, bits):
    """Halving the step divides it by 8, but for its part of fourth order, which halves beside it
    each time.

    Not at 3 bits: there the third derivative along the step is near 0 on this text, and fourth
    order is what remains.
    """
    line, delta, remainders = trained.line, rounded_steps(trained.line.model, bits), []
    whole = line.evaluate(0, delta)
    before = line.moved(0, {})
    for scale in (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16):
        increase = line.moved(0, {name: scale * step for name, step in delta.items()}) - before
        remainders.append(
            increase - scale * whole.slope - scale**2 * math.fsum(whole.dots.values()) / 2
        )
    orders = [
        math.log2(abs(remainder / other)) for remainder, other in itertools.pairwise(remainders)
    ]
    assert orders[-1] == pytest.approx(3, abs=0.15)
    assert abs(orders[-1] - 3) < abs(orders[0] - 3)
