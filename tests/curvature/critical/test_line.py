"""The search along a line, on functions whose answers are known, and against a dense scan.

Shapes: B sequences, P parameters, C multiples.
"""

import numpy as np
import pytest

from curvature.critical.line import PASSES, TOLERANCE, find_crossing, measure_line


class Quadratic:
    """Losses g_b.(c d) + (c d)'H(c d) / 2 of sequences b, with a gradient of each."""

    def __init__(self, seed: int = 0, sequences: int = 8, spread: float = 0.1):
        draw = np.random.default_rng(seed)
        root_PP = draw.normal(size=(5, 5))
        self.hessian_PP = root_PP @ root_PP.T
        self.direction_P = draw.normal(size=5)
        self.gradients_BP = -self.direction_P + spread * draw.normal(size=(sequences, 5))
        self.calls = 0

    def __call__(self, multiple: float):
        self.calls += 1
        moved_P = multiple * self.direction_P
        return 3.0 + self.gradients_BP @ moved_P + moved_P @ self.hessian_PP @ moved_P / 2

    def measure(self, **changes):
        base_B, self.calls = self(0.0), 0
        settings = {"start": 0.25, "rise": 1e-3, "reach": 64.0, "noise": 1e-12} | changes
        norm = float(np.linalg.norm(self.direction_P))
        return measure_line(self, base_B, norm=norm, **settings)


@pytest.mark.parametrize("length", [1e-3, 0.03, 1.0, 10.0])
def test_a_quadratic_is_measured_whatever_the_length_of_the_direction(length):
    loss = Quadratic()
    loss.direction_P *= length
    line = loss.measure(reach=1e5)
    slope = float(loss.gradients_BP.mean(0) @ loss.direction_P)
    second = float(loss.direction_P @ loss.hessian_PP @ loss.direction_P)
    square = float(loss.direction_P @ loss.direction_P)
    # rounding of losses of 3 nats over a rise of a thousandth
    assert line["slope"]["mean"] == pytest.approx(slope, rel=1e-9)
    assert line["curvature"]["mean"] == pytest.approx(second / square, rel=1e-9)
    assert line["directional_sharpness"] == pytest.approx(second / -slope, rel=1e-9)
    crossing, found = -2 * slope / second, line["critical"]
    assert (found["outcome"], found["is_narrow"]) == ("crossing", True)
    assert found["not_above"] <= crossing <= found["above"]
    assert found["above"] - found["not_above"] <= TOLERANCE * found["above"]
    # Linear between the ends of the bracket: a quadratic is off by at most width^2 / 4 / crossing.
    error = (found["above"] - found["not_above"]) ** 2 / 4 / crossing
    assert found["multiple"]["mean"] == pytest.approx(crossing, abs=error)
    assert found["sharpness"]["mean"] == pytest.approx(2 / found["multiple"]["mean"], rel=1e-12)
    assert line["forward_passes"] == loss.calls <= PASSES < 10


def test_errors_are_those_over_draws_of_the_sequences():
    """The spread of 400 measurements with other sequences, beside what each says of itself."""
    figures = ("slope", "curvature", "sharpness")
    means: dict[str, list[float]] = {name: [] for name in figures}
    errors: dict[str, list[float]] = {name: [] for name in figures}
    hessian = Quadratic()
    for seed in range(400):
        loss = Quadratic(spread=0.3, sequences=16)
        noise = np.random.default_rng(seed + 1).normal(size=(16, 5))
        loss.gradients_BP = -hessian.direction_P + 0.3 * noise
        line = loss.measure()
        found = line | line["critical"]
        for name in figures:
            means[name].append(found[name]["mean"])
            errors[name].append(found[name]["standard_error"])
    assert np.std(means["curvature"]) < 1e-9  # all sequences share the Hessian
    for name in ("slope", "sharpness"):
        # the standard deviation of 400 draws is known to 3.5%; three times that
        assert np.mean(errors[name]) == pytest.approx(np.std(means[name]), rel=0.11)


def bumpy(multiple):
    """Falls, turns, and crosses 0 once, at half the multiple that its curvature at 0 says."""
    return -0.3 * multiple + 0.06 * multiple**2 + 0.01 * multiple**4 + 0.01 * np.sin(multiple)


def test_no_other_multiple_of_a_dense_scan_is_smaller():
    increases_B = np.array([0.9, 1.1])  # two sequences, of which 1 is the mean
    line = measure_line(
        lambda c: bumpy(c) * increases_B,
        np.zeros(2),
        norm=2.0,
        start=0.25,
        rise=1e-5,  # so near to 0 that the fourth power is no part of it
        reach=64.0,
        noise=0.0,
    )
    scanned_C = np.linspace(1e-4, 8, 80_000)
    smallest = scanned_C[bumpy(scanned_C) > 0][0]
    assert line["critical"]["not_above"] <= smallest <= line["critical"]["above"]
    # between ends an eighth apart the powers bend the line by less than 2%
    assert line["critical"]["multiple"]["mean"] == pytest.approx(smallest, rel=0.02)
    assert line["curvature"]["mean"] == pytest.approx(0.12 / 4, rel=0.02)


def test_no_crossing_is_a_result():
    loss = Quadratic()
    loss.hessian_PP *= 0
    line = loss.measure(reach=16.0, noise=0.0)
    found = line["critical"]
    assert (found["outcome"], found["not_above"], found["above"]) == ("none", 16.0, None)
    assert found["multiple"] is found["sharpness"] is None
    assert loss.calls <= PASSES


@pytest.mark.parametrize("reach", [0.1, 4.0])
def test_no_loss_is_evaluated_beyond_the_reach(reach):
    """On a flat line the second pair would be 64 times as far as the first, at 16."""
    loss = Quadratic()
    loss.hessian_PP *= 0
    line = loss.measure(reach=reach, noise=0.0)
    assert max(abs(each["multiple"]) for each in line["evaluated"]) == reach
    assert (line["critical"]["outcome"], line["critical"]["not_above"]) == ("none", reach)


def test_the_side_is_that_on_which_the_loss_falls():
    """Along -d all is the same but for signs."""
    lines = []
    for sign in (1, -1):
        loss = Quadratic()
        loss.direction_P *= sign
        lines.append(loss.measure())
    ahead, back = lines
    assert (ahead["critical"]["side"], back["critical"]["side"]) == (1, -1)
    assert back["slope"]["mean"] == -ahead["slope"]["mean"] > 0
    assert back["critical"]["multiple"]["mean"] == -ahead["critical"]["multiple"]["mean"] < 0
    for figure in ("sharpness", "not_above", "above", "outcome"):
        assert back["critical"][figure] == ahead["critical"][figure]
    assert back["curvature"] == ahead["curvature"]


def test_a_loss_that_rises_both_ways_has_a_bound():
    increases_B = np.array([0.9, 1.1])
    line = measure_line(
        lambda c: abs(c) * increases_B,
        np.zeros(2),
        norm=1.0,
        start=0.25,
        rise=1e-3,
        reach=64.0,
        noise=0.0,
    )
    found = line["critical"]
    assert (found["outcome"], found["not_above"], found["sharpness"]) == ("rises", 0.0, None)
    assert 0 < found["above"] < 1e-3
    assert line["directional_sharpness"] is None
    assert line["forward_passes"] == PASSES


def test_a_concave_line_has_negative_curvature():
    loss = Quadratic()
    loss.hessian_PP *= -1
    line = loss.measure()
    assert line["curvature"]["mean"] < 0
    assert line["critical"]["outcome"] == "none"


def test_below_the_noise_there_is_no_curvature():
    line = Quadratic().measure(noise=1e-3)
    assert line["curvature"] is line["second_derivative"] is line["directional_sharpness"] is None


@pytest.mark.parametrize("crossing", [0.3, 1.0, 1.9, 7.3, 100.0])
def test_the_search_alone_brackets_the_crossing(crossing):
    calls = []

    def increase(multiple):
        calls.append(multiple)
        return multiple - crossing

    bracket = find_crossing(increase, 1.0, reach=1e3, passes=40)
    assert bracket.not_above <= crossing <= bracket.above
    assert bracket.is_narrow
    assert len(set(calls)) == len(calls)  # no multiple is paid for twice


def test_a_search_that_runs_out_of_passes_says_what_it_knows():
    bracket = find_crossing(lambda c: c - 100.0, 1.0, reach=1e3, passes=8)
    assert (bracket.not_above, bracket.above) == (64.0, 128.0)
    assert (bracket.outcome, bracket.is_narrow) == ("crossing", False)
