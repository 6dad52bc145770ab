"""SAM sharpness against its series, against random directions and against the exact maximum of the parabola.

Shapes: P parameters, K steps, B sequences.
"""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from ckpt_tools.ranks import start
from curvature.slices.losses import SequenceLosses
from curvature.slices.sam import sam_sharpness
from tests.curvature.conftest import random_tokens, tiny_model
from train.command import UserError


def sharpness(losses, radii, steps=1):
    return sam_sharpness(losses, losses(), 1.0, radii, steps, start("cpu"))


def loss_moved(curved, offset_P) -> float:
    """The mean loss at theta + offset, put back afterwards."""
    weights = curved.losses.weights
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    pieces = torch.as_tensor(offset_P).split([weight.numel() for weight in weights.values()])
    with torch.no_grad():
        for (name, weight), piece in zip(weights.items(), pieces, strict=True):
            weight.copy_(before[name] + piece.view_as(weight))
        loss = float(curved.losses().mean())
        for name, weight in weights.items():
            weight.copy_(before[name])
    return loss


def test_the_gradient_is_the_dense_one(curved):
    assert curved.flat(curved.losses.gradient()).numpy() == pytest.approx(curved.dense.gradient_P.numpy(), abs=1e-13)


def test_sharpness_follows_its_series_to_third_order(curved):
    gradient, hessian = curved.dense.gradient_P.numpy(), curved.dense.hessian_PP.numpy()
    norm = np.linalg.norm(gradient)
    radii = [8e-3, 4e-3, 2e-3, 1e-3]
    found = sharpness(curved.losses, radii)
    assert found["gradient_norm"] == pytest.approx(norm)
    remainders = []
    for row in found["radii"]:
        rho = row["radius"]
        assert row["first_order"] == pytest.approx(rho * norm)
        remainders.append(row["sharpness"] - rho * norm - rho**2 * (gradient @ hessian @ gradient) / norm**2 / 2)
    assert abs(remainders[-1]) < 1e-3 * found["radii"][-1]["sharpness"]
    orders = np.diff(np.log(np.abs(remainders))) / np.diff(np.log(radii))
    assert orders == pytest.approx(3, abs=0.3)


def test_no_random_direction_rises_as_far(curved):
    radius = 0.02
    (row,) = sharpness(curved.losses, [radius])["radii"]
    generator = np.random.default_rng(0)
    directions = generator.standard_normal((200, len(curved.dense.gradient_P)))
    directions *= radius / np.linalg.norm(directions, axis=1, keepdims=True)
    rises = np.array([loss_moved(curved, direction) for direction in directions]) - curved.dense.loss
    assert (rises < row["sharpness"]).mean() >= 0.99


def test_more_steps_find_the_maximum_of_the_parabola(curved):
    """On |e| = rho it solves (nu - H) e = g with nu above all eigenvalues: the secular equation of trust regions."""
    radius = 2e-3
    values, vectors = np.linalg.eigh(curved.dense.hessian_PP.numpy())
    coefficients = vectors.T @ curved.dense.gradient_P.numpy()

    def excess(nu):
        return np.linalg.norm(coefficients / (nu - values)) - radius

    nu = brentq(excess, values[-1] + 1e-9, values[-1] + np.linalg.norm(coefficients) / radius, xtol=1e-13)
    exact = loss_moved(curved, vectors @ (coefficients / (nu - values))) - curved.dense.loss
    (row,) = sharpness(curved.losses, [radius], steps=8)["radii"]
    assert row["worst"]["sharpness"] > row["sharpness"]
    assert row["worst"]["sharpness"] == pytest.approx(exact, rel=2e-3)  # the parabola leaves out the third order
    assert row["worst"]["step"] > 1


def test_standard_errors_are_over_the_differences_of_sequences(curved):
    base_B = curved.losses().numpy()
    weights = curved.losses.weights
    (row,) = sharpness(curved.losses, [0.1])["radii"]
    direction = curved.dense.gradient_P / curved.dense.gradient_P.norm()
    pieces = direction.split([weight.numel() for weight in weights.values()])
    with torch.no_grad():
        for weight, piece in zip(weights.values(), pieces, strict=True):
            weight.add_(piece.view_as(weight), alpha=0.1)
    differences_B = curved.losses().numpy() - base_B
    assert row["sharpness"] == pytest.approx(differences_B.mean(), rel=1e-9)
    assert row["standard_error"] == pytest.approx(differences_B.std(ddof=1) / 2, rel=1e-9)


def test_the_weights_are_back_to_the_bit():
    losses = SequenceLosses(tiny_model(torch.float32), random_tokens(4), batch_size=2)
    before = {name: weight.detach().clone() for name, weight in losses.weights.items()}
    sharpness(losses, [0.1, 0.5], steps=2)
    assert all(torch.equal(before[name], weight) for name, weight in losses.weights.items())


def test_a_flat_place_is_refused():
    model = tiny_model(torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    with pytest.raises(UserError, match=r"gradient's norm is 0.0"):
        sharpness(SequenceLosses(model, random_tokens(2), batch_size=2), [0.1])
