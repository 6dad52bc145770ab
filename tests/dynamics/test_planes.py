"""The pictures of planes: places, distances, lines and words, of results that are made up."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.lines import Line2D

from ckpt_tools.hf.directory import write_result
from curvature.slices.figure import MARKERS
from dynamics.figures.planes import LOSS, X, Y, planes, trajectory_plane
from study.definition import Study
from study.figures.canvas import Canvas
from study.paths import hf_directory
from study.recipes.resolve import resolve
from tests.dynamics.drawing import drawn

ENDS = {"constant rate": (0.0, 0.0), "annealed": (3.0, 0.0), "average": (1.5, 2.0)}


def bowl(x: float, y: float) -> float:
    """A loss whose lowest place is the average's."""
    return 3.0 + 0.02 * (x - 1.5) ** 2 + 0.02 * (y - 2.0) ** 2


def grid_of(x: list[float], y: list[float]) -> dict[str, Any]:
    return {"x": x, "y": y, "loss": [[bowl(a, b) for a in x] for b in y]}


def point_at(name: str, x: float, y: float, over: float) -> dict[str, Any]:
    errors = {"standard_error": 0.1, "increase_standard_error": 0.004}
    losses = {"loss": bowl(x, y), "increase": bowl(x, y) - over}
    return {"name": name, "x": x, "y": y} | losses | errors


@pytest.fixture
def study() -> Study:
    return resolve("pythia-160m-lawa", "smoke")


def canvas_of(study: Study, directory: Path) -> Canvas:
    return Canvas(study, [], directory)


def panel_of(picture: object) -> Axes:
    assert isinstance(picture, Picture)
    return picture.axes[0]


def places_of(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in np.asarray(line.get_xydata())]


def test_nothing_measured_is_no_figure(study, tmp_path):
    assert planes.draw(canvas_of(study, tmp_path)) is None
    assert trajectory_plane.draw(canvas_of(study, tmp_path)) is None


def test_a_plane_has_its_points_their_names_and_their_distances(study, tmp_path):
    points = [point_at(name, *place, over=bowl(0, 0)) for name, place in ENDS.items()]
    grid = grid_of([-1.0, 0.0, 1.0, 2.0, 3.0, 4.0], [-1.0, 0.0, 1.0, 2.0, 3.0])
    content = {"spec": {"plane": []}, "measured": {"points": points, "grid": grid}}
    write_result(tmp_path / Path(study.resolved_planes[0].result).parent, content)
    drawing = drawn(planes, canvas_of(study, tmp_path))
    panel = panel_of(drawing.chart)

    marked = {
        line.get_marker(): places_of(line)[0]
        for line in panel.lines
        if line.get_marker() in MARKERS
    }
    assert marked == dict(zip(MARKERS, ENDS.values(), strict=True))
    words = [text.get_text() for text in panel.texts]
    assert set(ENDS) <= set(words)
    # 3; from either to the average sqrt(1.5^2 + 2^2)
    assert sorted(word for word in words if word in {"3", "2.5"}) == ["2.5", "2.5", "3"]
    cost = next(word for word in words if "\n" in word)
    assert "annealed  +0.0 \N{PLUS-MINUS SIGN} 4.0" in cost
    assert "average  \N{MINUS SIGN}125.0 \N{PLUS-MINUS SIGN} 4.0" in cost

    rows = [row for row in drawing.rows if row["series"] == "grid"]
    assert [row[LOSS] for row in rows] == [bowl(row[X], row[Y]) for row in rows]
    assert len(rows) == 30
    named = {row["series"]: (row[X], row[Y]) for row in drawing.rows if row["series"] != "grid"}
    assert named == ENDS


def spiral(index: int) -> tuple[float, float]:
    return (4 - 0.4 * index) * math.cos(index), (4 - 0.4 * index) * math.sin(index)


def test_a_trajectory_has_a_line_of_its_own_and_one_from_where_each_branch_leaves(study, tmp_path):
    """The study may have been moved since: checkpoints are found by the ends of their paths."""
    (branched,) = study.branched_runs
    models = [(branched.run, model) for model in branched.models]
    models += [(run, model) for run, several in branched.branches.items() for model in several]
    places = dict(zip(models, map(spiral, range(len(models))), strict=True))
    end = bowl(*places[branched.run, branched.models[-1]])
    points = [
        point_at("", *place, over=end)
        | {"path": f"/elsewhere/{hf_directory(run, model)}", "fitted": run == branched.run}
        | {"off_plane": 1.0, "off_plane_share": 0.25, "checkpoint_loss": 3.5}
        for (run, model), place in places.items()
    ]
    axis = np.linspace(-6, 6, 5).tolist()
    measured = {"points": points, "grid": grid_of(axis, axis), "variance_shares": [0.8, 0.15]}
    content = {"spec": {"trajectory": []}, "measured": measured}
    write_result(tmp_path / Path(branched.result).parent, content)
    canvas = canvas_of(study, tmp_path)
    drawing = drawn(trajectory_plane, canvas)
    panel = panel_of(drawing.chart)

    lines = [places_of(line) for line in panel.lines]
    trunk, *cooldowns = lines
    assert trunk == [places[branched.run, model] for model in branched.models]
    starts = {run.name: run.branch_from.step for run in study.trained if run.branch_from}
    for line, (run, several) in zip(cooldowns, branched.branches.items(), strict=True):
        (start,) = (model for model in branched.models if model.step == starts[run])
        assert line == [places[branched.run, start], *(places[run, model] for model in several)]
    assert "80%" in panel.get_xlabel()
    assert "15%" in panel.get_ylabel()
    words = [text.get_text() for text in panel.texts]
    assert {"step 32", "step 80"} <= set(words)
    assert all(canvas.runs.looks[run].label in words for run in branched.branches)
    assert next(word for word in words if "off the plane" in word).count("25%") == 3

    of_checkpoints = [row for row in drawing.rows if row["series"] != "grid"]
    assert {(row[X], row[Y]) for row in of_checkpoints} == set(places.values())
    assert len(of_checkpoints) == len(places)
    assert {row["loss of the checkpoint itself, nats/token"] for row in of_checkpoints} == {3.5}
