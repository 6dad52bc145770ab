"""The picture: levels, interpolation, places of points, and words that do not overlap."""

import itertools

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from curvature.slices.figure import add_colour_bar, costs, draw_plane, increase_over, levels_of
from curvature.slices.plane import grid_coordinates


def loss_at(x, y):
    return 3 + 0.02 * (x - 0.1) ** 2 + 0.001 * (y + 1) ** 2


def made_up(previous, quantized, loss_of=None, count=9, extent=0.35) -> dict:
    """A result of a plane on which the loss is a function of the place."""
    loss_of = loss_of or loss_at
    places = {"base": (0.0, 0.0), "previous": previous, "quantized": quantized}
    margin = extent * max(np.hypot(*previous), np.hypot(*quantized))
    x, y = (
        grid_coordinates([place[axis] for place in places.values()], margin, count)
        for axis in range(2)
    )
    points = [
        {"name": name, "x": place[0], "y": place[1], "loss": loss_of(*place), "standard_error": 0.2}
        | {"increase": loss_of(*place) - loss_of(0.0, 0.0), "increase_standard_error": 0.003}
        for name, place in places.items()
    ]
    model = {"path": "runs/a/hf/step00000640", "lineage": {"run": "lr3e-3"}}
    previous_model = {"path": "runs/a/hf/step00000592", "lineage": {"run": "lr3e-3"}}
    return {
        "model": model,
        "spec": {"sequences": 16, "previous": previous_model, "quantized": {"spec": "gptq-b3-g32"}},
        "measured": {
            "points": points,
            "grid": {"x": x, "y": y, "loss": [[loss_of(a, b) for a in x] for b in y]},
            "directions": {"lengths": [1.0, 1.0]},
        },
    }


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 0.31), (-0.004, 0.31), (-2.0, 0.5), (0.0, 5.0), (-1e-5, 11.0)]
)
def test_levels_hold_zero_and_reach_beyond_everything(low, high):
    levels = levels_of(np.array([[low, 0.0], [high / 3, high]]))
    assert levels == sorted(set(levels))
    assert levels.count(0.0) == 1
    assert levels[-1] >= high > levels[-2]
    smallest = levels[levels.index(0.0) + 1]
    assert levels[0] <= low or -low < smallest
    for level in filter(None, levels):
        assert f"{abs(level):e}"[0] in "125"


def test_nothing_above_the_base_has_levels_below_alone():
    assert levels_of(np.array([[-0.3, 0.0]]))[-1] == 0.0


def test_what_is_drawn_is_a_parabola_where_the_loss_is_one():
    """Every point of the contour at a level has it, though the grid has nine places an axis."""
    result = made_up((2.2, 0.0), (0.5, 3.0))
    increase = result["measured"]["points"][0]["loss"]
    figure = Figure()
    levels = [-1e-5, 0.0, 0.05, 0.2, 10.0]
    draw_plane(figure.subplots(), result, levels)
    lines = figure.axes[0].collections[1]
    for level, path in zip(levels[1:-1], lines.get_paths(), strict=True):
        x, y = np.asarray(path.vertices).T
        assert loss_at(x, y) - increase == pytest.approx(np.full(len(x), level), abs=1e-3)


def drawn(result) -> Figure:
    figure = Figure(figsize=(6, 5))
    axes = figure.subplots()
    filled = draw_plane(axes, result, levels_of(increase_over(result)))
    add_colour_bar(figure, filled, axes.inset_axes((1.03, 0.0, 0.05, 1.0)), "base")
    return figure


@pytest.mark.parametrize(
    ("previous", "quantized"),
    [((2.2, 0.0), (0.002, 10.5)), ((10.0, 0.0), (0.5, 0.4)), ((1.0, 0.0), (0.98, 0.3))],
)
def test_the_points_are_where_they_are_and_their_names_do_not_overlap(previous, quantized):
    result = made_up(previous, quantized)
    figure = drawn(result)
    FigureCanvasAgg(figure).draw()
    (axes,) = figure.axes
    marks = np.array([line.get_xydata() for line in axes.lines])[:, 0]
    assert marks == pytest.approx(np.array([(0.0, 0.0), previous, quantized]))
    grid = result["measured"]["grid"]
    assert axes.get_xlim() == pytest.approx((grid["x"][0], grid["x"][-1]))
    assert axes.get_ylim() == pytest.approx((grid["y"][0], grid["y"][-1]))
    pixels = axes.transData.transform([(0, 0), (1, 0), (0, 1)])
    assert pixels[1][0] - pixels[0][0] == pytest.approx(pixels[2][1] - pixels[0][1], rel=1e-3)
    names = [text for text in axes.texts if "theta" in text.get_text()]
    assert len(names) == 3
    for box, other in itertools.combinations([text.get_window_extent() for text in names], 2):
        assert not box.overlaps(other)
    assert [cost.startswith("$") for cost in costs(result).splitlines()] == [True, True]


def test_the_bar_says_what_the_colours_mean():
    figure = drawn(made_up((2.0, 0.0), (0.5, 3.0)))
    (bar,) = figure.axes[0].child_axes
    assert "10⁻³ nats/token" in bar.get_ylabel()
    ticks = [
        float(text.get_text().replace("\N{MINUS SIGN}", "-")) for text in bar.get_yticklabels()
    ]
    assert ticks == sorted(ticks)
    assert ticks[0] < 0.0 < ticks[-1]
