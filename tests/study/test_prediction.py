"""The second order against what is measured: what is drawn, what is said, and that it follows from the numbers."""

import json
import math
import re

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from study.canvas import Canvas
from study.layout import step_result
from study.prediction import percent, prediction_plot, read_step_result, step_findings
from study.summary import summarize
from tests.study.curved import BLOCKS, estimate, step_content
from tests.study.synthetic import table_of
from train.command import UserError
from train.run_directory import write_json

SPEC = "gptq-b3-g32"
TITLE = "GPTQ, 3 bits, groups of 32"


def write_steps(directory, study, spec: str, **by_figure: list) -> None:
    """Steps of all runs from lists with an entry per run."""
    for index, run in enumerate(study.runs):
        given = {name: values[index] for name, values in by_figure.items()}
        write_json(directory / step_result(run, spec), step_content(**{"measured": 0.01} | given))


def said(directory, study) -> list[str]:
    return [one for one in step_findings(study, summarize(study, table_of(directory, study))) if TITLE in one]


def test_a_step_is_sharper_or_flatter_where_its_ratio_is_told_from_one(study_dir, study):
    write_steps(study_dir, study, SPEC, ratio=[(0.25, 0.02), (1.5, 0.05), (0.95, 0.1), (0.5, 0.03)])
    sharpness, _ = said(study_dir, study)
    assert sharpness.replace("\N{PLUS-MINUS SIGN}", "+-") == (
        f"The step of {TITLE}, is flatter than a random step at peak learning rate 0.001 (0.250 +- 0.020) and 0.03 "
        "(0.500 +- 0.030); sharper than a random step at peak learning rate 0.003 (1.500 +- 0.050); not told apart "
        "from a random step at peak learning rate 0.01 (0.95 +- 0.10)."
    )


SHARPER, SAME = "sharper than", "not told apart from"


@pytest.mark.parametrize(
    ("shift", "alike", "words"), [(0.05, 1, SAME), (0.1, 1, SHARPER), (0.1, 4, SAME), (0.2, 4, SHARPER)]
)
def test_the_verdict_is_that_of_a_t_test_with_holm(study_dir, study, shift, alike, words):
    """Of four ratios some have one p-value: with the others at 0 Holm multiplies the largest by how many there are."""
    microbatches = study.curvature.step_microbatches
    values = 1 + shift + 0.2 * np.random.default_rng(1).normal(size=microbatches)
    near = (float(values.mean()), float(np.std(values, ddof=1)) / math.sqrt(microbatches))
    adjusted = alike * ttest_1samp(values, 1).pvalue
    assert not 0.04 < adjusted < 0.06, "not near the border"
    assert (adjusted < 0.05) == (words == SHARPER)
    write_steps(study_dir, study, SPEC, ratio=[*[(0.25, 0.001)] * (4 - alike), *[near] * alike])
    sentence = said(study_dir, study)[0]
    assert re.search(f"{words} a random step at peak learning rate [^;]*0.03 [(]", sentence), sentence


def test_the_prediction_is_said_where_there_is_an_increase_to_predict(study_dir, study):
    """Of 0.01 with an error of 20% the interval excludes 0; the made-up relative difference has an error of 1%."""
    write_steps(study_dir, study, SPEC, share=[0.96, 1.02, 1.0, 0.9])
    path = study_dir / step_result(study.runs[2], SPEC)
    content = json.loads(path.read_text())
    whole = content["measured"]["whole"]
    whole["measured"]["interval"] = [-0.001, 0.02]
    whole["second_order"]["mean"], whole["remainder"] = 0.008, estimate(0.0004, 0.00008)
    path.write_text(json.dumps(content))
    _, predicted = said(study_dir, study)
    plain = predicted.replace("\N{PLUS-MINUS SIGN}", "+-").replace("\N{MINUS SIGN}", "-")
    assert plain == (
        f"The second-order prediction of the loss increase of {TITLE}, lies -4.0 +- 1.0% (0.001), +2.0 +- 1.0% (0.003) "
        "and -10.0 +- 1.0% (0.03) off the measured one; it leaves over +5.0 +- 1.0% (0.01) of delta'H delta / 2, where "
        "the measured increase itself is not told from 0."
    )


def test_nothing_is_said_of_what_is_not_measured_of_every_run(study_dir, study):
    (study_dir / step_result(study.runs[0], SPEC)).unlink()
    assert said(study_dir, study) == []
    everything = step_findings(study, summarize(study, table_of(study_dir, study)))
    assert len(everything) == 2 * (len(study.quantization.by_block) - 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_figure_holds_every_part_of_every_step(study_dir, study, sign):
    """Where an increase is negative, or an interval reaches 0, the axes are not logarithmic."""
    for run in study.runs:
        for spec in study.quantization.by_block:
            write_json(study_dir / step_result(run, spec), step_content(sign * 1e-3 * run.optimizer.peak_lr))
    panels = [panel for _, panel in prediction_plot(Canvas(study, []), study_dir).shown]
    above, below = panels[:3], panels[3:]
    for panel in above:
        assert {panel.x.is_log, panel.y.is_log} == {sign > 0}
        points = sorted((point.x, point.y) for series in panel.series if series.is_data for point in series.points)
        measured = [
            sign * 1e-3 * run.optimizer.peak_lr / part for run in study.runs for part in (1, *[BLOCKS] * BLOCKS)
        ]
        assert points == [pytest.approx((one, 0.96 * one)) for one in sorted(measured)]
        assert panel.x.limits == panel.y.limits
        low, high = panel.x.limits
        assert low is not None
        assert high is not None
        assert low < points[0][0]
        assert high > points[-1][0]
    for panel in below:
        remainders = [point.y for series in panel.series for point in series.points]
        expected = [
            sign * 4e-5 * run.optimizer.peak_lr / part for run in study.runs for part in (*[BLOCKS] * BLOCKS, 1)
        ]
        assert remainders == [pytest.approx(one) for one in expected]
        labels = [text.split("\n") for _, text in panel.x.ticks]
        assert labels == [[f"{run.optimizer.peak_lr:g}", percent(-0.04, 0.01)] for run in study.runs]


def test_steps_that_are_missing_leave_their_place_empty_and_broken_ones_are_named(study_dir, study):
    for run in study.runs[1:]:
        (study_dir / step_result(run, SPEC)).unlink()
    panel = prediction_plot(Canvas(study, []), study_dir).panels[3]
    assert panel is not None
    assert {series.run for series in panel.series} == {f"{study.runs[0].optimizer.peak_lr:g}"}
    assert [text.partition("\n")[2] for _, text in panel.x.ticks][1:] == [""] * 3
    path = study_dir / step_result(study.runs[0], SPEC)
    for content in ("{", "[1]", '{"measured": {}}'):
        path.write_text(content)
        with pytest.raises(UserError, match=r"result\.json is no result of a quantization step"):
            read_step_result(path)
