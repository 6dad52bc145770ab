"""The figure of slices: every run in one scale of colours, its points where they belong."""

import json

import pytest
from PIL import Image

from curvature.slices.figure import MARKERS
from study import slices
from study.layout import slice_result
from study.slices import draw_slices, read_slice
from train.command import UserError

SPEC = "gptq-b3-g32"


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr(slices, "save", lambda figure, path: figures.append(figure))
    return figures


def change(path, factor: float) -> None:
    """All losses over the first point's, times a factor."""
    content = json.loads(path.read_text())
    base = content["measured"]["points"][0]["loss"]
    grid = content["measured"]["grid"]
    grid["loss"] = [[base + factor * (loss - base) for loss in row] for row in grid["loss"]]
    path.write_text(json.dumps(content))


def test_runs_share_one_scale_of_colours(study_dir, study, drawn, tmp_path):
    for run, factor in zip(study.runs, (1, 0.5, 0.1, 0.02), strict=True):
        change(study_dir / slice_result(run, SPEC), factor)
    draw_slices(study, study_dir, tmp_path / "slices.png")
    (figure,) = drawn
    panels = figure.axes[: len(study.runs)]
    levels = [next(tuple(one.levels) for one in axis.collections if one.get_cmap().N > 1) for axis in panels]
    assert len(set(levels)) == 1
    # the highest is 0.08 x 4 + 0.002 x 36 - 0.0005 x 6 = 0.389
    assert levels[0][-1] == 0.5
    titles = [axis.get_title(loc="left") for axis in panels]
    assert titles == [f"peak learning rate {run.optimizer.peak_lr:g}" for run in study.runs]


def test_the_points_lie_where_they_were_measured_with_what_they_cost(study_dir, study, drawn, tmp_path):
    draw_slices(study, study_dir, tmp_path / "slices.png")
    places = {"base": (0.0, 0.0), "previous": (1.0, 0.0), "quantized": (0.1, 4.0)}
    for axis in drawn[0].axes[: len(study.runs)]:
        found = {line.get_marker(): (line.get_xdata()[0], line.get_ydata()[0]) for line in axis.get_lines()}
        assert found == {MARKERS[name]: place for name, place in places.items()}
        text = next(one.get_text() for one in axis.texts if "\n" in one.get_text())
        # 0.08 at the one; 0.0008 + 0.032 - 0.002 at the other
        assert "+0.0800 \N{PLUS-MINUS SIGN} 0.0040" in text
        assert "+0.0308 \N{PLUS-MINUS SIGN} 0.0040" in text
    words = " ".join(text.get_text() for text in drawn[0].legends[0].get_texts())
    assert "step00000640" in words
    assert "step00000576" in words
    assert "GPTQ, 3 bits, groups of 32" in words


def test_slices_that_are_missing_are_left_out_and_broken_ones_are_named(study_dir, study, tmp_path):
    paths = [study_dir / slice_result(run, SPEC) for run in study.runs]
    for keep in (1, 0):
        for path in paths[keep:]:
            path.unlink(missing_ok=True)
        draw_slices(study, study_dir, tmp_path / "slices.png")
        with Image.open(tmp_path / "slices.png") as image:
            assert len(set(image.convert("L").tobytes())) > 20
    for content in ("{", "[1]", '{"measured": {"grid": {}}}'):
        paths[0].write_text(content)
        with pytest.raises(UserError, match=r"result\.json is no result of a"):
            read_slice(paths[0])
