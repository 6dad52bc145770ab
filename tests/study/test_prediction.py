"""The second order against the measured increase: every part of every step is drawn."""

import json

import pytest

from base.errors import UserError
from ckpt_tools.hf.measured import Step
from dynamics.figures.prediction import (
    MEASURED,
    PREDICTED,
    REMAINDER,
    percent,
    prediction,
    relative_text,
)
from study.figures.canvas import Canvas
from study.paths import step_result
from tests.sealing import reseal
from tests.study.curved import BLOCKS, step_content

SPEC = "gptq-b3-g32"
TITLE = "GPTQ, 3 bits, groups of 32"


@pytest.mark.parametrize("sign", [1, -1])
def test_the_figure_holds_every_part_of_every_step(study_dir, study, sign):
    """If an increase is negative, or an interval reaches 0, the axes are not logarithmic."""
    for run in study.runs:
        for spec in study.quantization.by_block:
            reseal(
                study_dir / step_result(run, spec),
                step_content(sign * 1e-3 * run.optimizer.peak_lr),
            )
    drawing = prediction.draw(Canvas(study, [], study_dir))
    assert drawing is not None
    assert isinstance(drawing.chart, dict)
    panels = drawing.chart["concat"]
    for panel in panels[:3]:
        marks = panel["layer"][-1]
        shown = sorted(
            (row[MEASURED.label], row[PREDICTED.label]) for row in marks["data"]["values"]
        )
        measured = [
            sign * 1e-3 * run.optimizer.peak_lr / part
            for run in study.runs
            for part in (1, *[BLOCKS] * BLOCKS)
        ]
        assert shown == [pytest.approx((value, 0.96 * value)) for value in sorted(measured)]
        x, y = (marks["encoding"][axis]["scale"] for axis in "xy")
        assert x == y
        assert (x.get("type") == "log") == (sign > 0)
        low, high = x["domain"]
        assert low < shown[0][0]
        assert high > shown[-1][0]
    for panel in panels[3:]:
        marks = panel["layer"][-1]
        remainders = [row[REMAINDER.label] for row in marks["data"]["values"]]
        expected = [
            sign * 4e-5 * run.optimizer.peak_lr / part
            for run in study.runs
            for part in (*[BLOCKS] * BLOCKS, 1)
        ]
        assert remainders == [pytest.approx(value) for value in expected]
        text = json.dumps(percent(-0.04, 0.01))
        assert marks["encoding"]["x"]["axis"]["labelExpr"].count(text) == len(study.runs)


def test_steps_that_are_missing_leave_their_place_empty_and_broken_ones_are_named(study_dir, study):
    for run in study.runs[1:]:
        (study_dir / step_result(run, SPEC)).unlink()
    drawing = prediction.draw(Canvas(study, [], study_dir))
    assert drawing is not None
    labels = {row["run"] for row in drawing.rows if row["panel"] == TITLE}
    assert labels == {f"{study.runs[0].optimizer.peak_lr:g}"}
    path = study_dir / step_result(study.runs[0], SPEC)
    for content in ("{", "[1]", '{"measured": []}'):
        path.write_text(content)
        with pytest.raises(UserError, match=r"result\.json"):
            prediction.draw(Canvas(study, [], study_dir))


def test_an_increase_that_may_be_none_has_no_relative_difference():
    whole = Step.model_validate(step_content(0.01)["measured"]).whole
    assert whole is not None
    assert whole.measured is not None
    assert relative_text(whole) == percent(-0.04, 0.01)
    unsure = whole.measured.model_copy(update={"interval": (-0.001, 0.02)})
    assert relative_text(whole.model_copy(update={"measured": unsure})) == "\N{EM DASH}"
