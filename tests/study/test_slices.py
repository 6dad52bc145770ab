"""The figure of slices: every run in one scale of colours, its points where they belong."""

import json

import numpy as np
import pytest
from matplotlib.contour import ContourSet

from curvature.slices.figure import MARKERS
from study.canvas import Canvas
from study.layout import slice_result
from study.slices import read_slice, slices_figure
from train.command import UserError

SPEC = "gptq-b3-g32"


def change(path, factor: float) -> None:
    """All losses over the first point's, times a factor."""
    content = json.loads(path.read_text())
    base = content["measured"]["points"][0]["loss"]
    grid = content["measured"]["grid"]
    grid["loss"] = [[base + factor * (loss - base) for loss in row] for row in grid["loss"]]
    path.write_text(json.dumps(content))


def test_runs_share_one_scale_of_colours(study_dir, study):
    for run, factor in zip(study.runs, (1, 0.5, 0.1, 0.02), strict=True):
        change(study_dir / slice_result(run, SPEC), factor)
    figure, _ = slices_figure(Canvas(study, []), study_dir)
    assert figure is not None
    panels = figure.axes[: len(study.runs)]
    levels = [next(tuple(one.levels) for one in axis.collections if isinstance(one, ContourSet)) for axis in panels]
    assert len(set(levels)) == 1
    # the highest is 0.08 x 4 + 0.002 x 36 - 0.0005 x 6 = 0.389
    assert levels[0][-1] == 0.5
    titles = [axis.get_title(loc="left") for axis in panels]
    assert titles == [f"peak learning rate {run.optimizer.peak_lr:g}" for run in study.runs]


def test_the_points_lie_where_they_were_measured_with_what_they_cost(study_dir, study):
    figure, plot = slices_figure(Canvas(study, []), study_dir)
    assert figure is not None
    for _, panel in plot.shown:
        assert panel.plane is not None
        assert panel.plane.increase.max() == pytest.approx(0.389)
        assert [(one.points[0].x, one.points[0].y) for one in panel.series] == [(0.0, 0.0), (1.0, 0.0), (0.1, 4.0)]
    places = {"base": (0.0, 0.0), "previous": (1.0, 0.0), "quantized": (0.1, 4.0)}
    for axis in figure.axes[: len(study.runs)]:
        found = {
            line.get_marker(): tuple(float(np.asarray(data)[0]) for data in line.get_data())
            for line in axis.get_lines()
        }
        assert found == {MARKERS[name]: place for name, place in places.items()}
        text = next(one.get_text() for one in axis.texts if "\n" in one.get_text())
        # 0.08 at the one; 0.0008 + 0.032 - 0.002 at the other
        assert "+0.0800 \N{PLUS-MINUS SIGN} 0.0040" in text
        assert "+0.0308 \N{PLUS-MINUS SIGN} 0.0040" in text
    words = " ".join(text.get_text() for text in figure.legends[0].get_texts())
    assert "step00000640" in words
    assert "step00000576" in words
    assert "GPTQ, 3 bits, groups of 32" in words


def test_slices_that_are_missing_are_left_out_and_broken_ones_are_named(study_dir, study):
    paths = [study_dir / slice_result(run, SPEC) for run in study.runs]
    for keep in (1, 0):
        for path in paths[keep:]:
            path.unlink(missing_ok=True)
        figure, plot = slices_figure(Canvas(study, []), study_dir)
        assert (figure is not None, len(plot.shown)) == (keep == 1, keep)
    for content in ("{", "[1]", '{"measured": {"grid": {}}}'):
        paths[0].write_text(content)
        with pytest.raises(UserError, match=r"result\.json is no result of a"):
            read_slice(paths[0])
