"""Charts of data: every value at its place, branches start at their parents, ends are at
what varies.
"""

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import vl_convert
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure as Picture

from curvature.slices.figure import MARKERS
from dynamics.figures.averages import averages
from dynamics.figures.curvature import curvature
from dynamics.figures.ends import ends
from dynamics.figures.losses import full_against_quantized
from dynamics.figures.quantization import (
    AXES,
    DIVERGENCE_AXIS,
    kl_divergence,
    methods,
    tasks,
)
from dynamics.figures.slices import slices
from study.figures.canvas import Canvas
from study.figures.charts import HIDDEN, Quantity, columns_of
from study.figures.figure import draw_all, figures_of, pictures_of
from study.figures.looks import runs_of
from study.measurements.quantization import ERRORS
from study.measurements.tasks import TasksSettings
from study.measurements.titles import spec_title
from study.paths import slice_result
from study.released import ReleasedRevision, ReleasedRun
from study.report.tables import shown_methods
from study.results.table import Row
from tests.dynamics.drawing import chart_of, drawn, layers_of
from tests.present import present
from tests.sealing import edited
from tests.study.synthetic import table_of, write_study
from tests.study.varied import budgets, limits, weight_decay

SPEC = "gptq-b3-g32"


@pytest.fixture(scope="module")
def branched(tmp_path_factory, study):
    changed = budgets(study)
    directory = write_study(tmp_path_factory.mktemp("drawing") / changed.name, changed)
    return changed, distinct(table_of(directory, changed)), directory


def distinct(rows: list) -> list:
    """The same rows with other values in every run, as runs of one peak have one synthetic
    error.
    """
    runs = list(dict.fromkeys(row["run"] for row in rows))
    return [
        Row.of({
            key: value * (1 + 0.1 * runs.index(row["run"])) if key.startswith("quant/") and value else value
            for key, value in dict(row).items()
        })
        for row in rows
    ]  # fmt: skip


def data_of(chart: Any) -> list[dict]:
    """All rows of the layers of a chart that have points."""
    if isinstance(chart, list):
        return [row for part in chart for row in data_of(part)]
    layers = chart.get("layer", [])
    has_points = any(layer.get("mark", {}).get("type") == "point" for layer in layers)
    values = chart["data"]["values"] if has_points else []
    return values + data_of(layers) + data_of(chart.get("concat", []))


@pytest.mark.parametrize("figure", [full_against_quantized, curvature, kl_divergence])
def test_a_chart_holds_every_value_that_its_table_lists(branched, figure):
    study, rows, directory = branched
    drawing = drawn(figure, Canvas(study, rows, directory))
    values = [row for row in drawing.rows if row["series"] == "weights"]
    shown = data_of(drawing.chart)
    if figure is full_against_quantized:  # the second half of training alone
        assert 0 < len(shown) < len(values)
        assert all(row in values for row in shown)
    else:
        assert shown == values


class Counted(list):
    """A table that counts how often it is gone through."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()


def test_the_solver_of_every_eigenvalue_is_found_in_one_pass(branched):
    """As often for many checkpoints as for the last one of each run."""
    study, rows, directory = branched
    ends = {run.name: run.total_steps for run in study.runs}
    tables = [Counted(rows), Counted(row for row in rows if row["step"] == ends[row["run"]])]
    drawings = [drawn(curvature, Canvas(study, table, directory)) for table in tables]
    assert tables[0].times == tables[1].times
    solved = {row["step"]: row["solver"] for row in drawings[0].rows if "solver" in row}
    assert solved == {step: f"{'not ' * (step % 120 == 0)}converged" for step in solved}
    assert len(set(solved.values())) == 2


def test_bars_are_from_the_low_end_to_the_high_one(branched):
    """Values of both are the table's: tests.study.test_interactive."""
    study, rows, directory = branched
    drawing = drawn(kl_divergence, Canvas(study, rows, directory))
    panel = chart_of(drawing)["concat"][0]
    bars = [layer for layer in layers_of(panel) if layer.get("mark", {}).get("type") == "rule"]
    assert [bar["encoding"]["y"]["field"] for bar in bars] == [f"{DIVERGENCE_AXIS.label}, low"]
    assert bars[0]["encoding"]["y2"]["field"] == f"{DIVERGENCE_AXIS.label}, high"


def test_a_branch_starts_at_its_parents_checkpoint(branched):
    study, rows, directory = branched
    canvas = Canvas(study, rows, directory)
    column = f"quant/{SPEC}/kl_divergence"
    (link,) = canvas.links(
        canvas.along(DIVERGENCE_AXIS, column, ""), canvas.tokens, DIVERGENCE_AXIS, {}
    )
    assert link["mark"]["type"] == "line"
    by_step = {(row["run"], row["step"]): row for row in rows}
    pairs: dict[str, list] = {}
    for row in link["data"]["values"]:
        pairs.setdefault(row["run"], []).append(row)
    for start in (320, 480, 640):
        label = canvas.runs.looks[f"wsd{start * 5 // 4}"].label
        parent, first = (
            by_step["stable", start],
            by_step[f"wsd{start * 5 // 4}", start + start // 8],
        )
        values = [row[DIVERGENCE_AXIS.label] for row in pairs.pop(label)]
        assert values == [1000 * parent[column], 1000 * first[column]]
    assert not pairs


def test_learning_rates_of_branches_begin_where_they_do(branched):
    study, rows, directory = branched
    canvas = Canvas(study, rows, directory)
    per_step = study.trained[0].tokens_per_step
    rates: dict[str, list] = {}
    for row in canvas.rates:
        rates.setdefault(row["run"], []).append(
            (row[canvas.tokens.label], row["learning rate / its peak"])
        )
    assert rates.keys() == {look.label for look in canvas.runs.looks.values()}
    for start in (320, 480, 640):
        first, *_, last = rates[canvas.runs.looks[f"wsd{start * 5 // 4}"].label]
        tokens = [first[0] * 1e6, last[0] * 1e6]
        assert tokens == pytest.approx([start * per_step, start * 5 // 4 * per_step])
        assert (first[1], last[1]) == (1.0, 0.0)


def test_schedules_that_coincide_are_one_line_of_no_run(study, tmp_path):
    rates = Canvas(study, [], tmp_path).rates
    assert {row["run"] for row in rates} == {""}
    assert max(row["learning rate / its peak"] for row in rates) == 1.0


@pytest.mark.parametrize("make", [budgets, weight_decay, limits])
def test_the_ends_are_at_what_is_varied_with_a_line_per_group(tmp_path, study, make):
    changed = make(study)
    rows = distinct(table_of(write_study(tmp_path / changed.name, changed), changed))
    varied = present(changed.varied)
    assert varied.values.keys() == {run.name for run in changed.runs}
    drawing = drawn(ends, Canvas(changed, rows, tmp_path))
    last = {row["run"]: row for row in rows if row["average"] is None}  # rows rise by step
    per = 1e6 if varied.unit == "tokens" else 1
    names = {look.label: run for run, look in runs_of(changed).looks.items()}
    columns = [(each, each.of(f"gptq-b{bits}-g32")) for each in ERRORS for bits in (3, 4)]
    panels = chart_of(drawing)["concat"]
    assert len(panels) == len(columns)
    for panel, (measure, column) in zip(panels, columns, strict=True):
        y = AXES[measure].label
        encodings = [layer["encoding"] for layer in layers_of(panel) if "encoding" in layer]
        (x,) = {layer["x"]["field"] for layer in encodings if "x" in layer}
        shown = {names[row["run"]]: (row[x] * per, row[y]) for row in data_of(panel)}
        assert shown == {
            run: (pytest.approx(value), AXES[measure].scale * last[run][column])
            for run, value in varied.values.items()
        }
        colours = {layer["color"]["field"] for layer in encodings if "color" in layer}
        assert colours == {"group" if len(set(varied.groups.values())) > 1 else "run"}


def test_one_value_has_one_colour_and_one_group_one_marker(branched):
    study, _, _ = branched
    looks = runs_of(study).looks
    varied = study.varied
    for run, look in looks.items():
        for other, beside in looks.items():
            same = varied.values.get(run) == varied.values.get(other)
            assert (look.colour == beside.colour) == same
            assert (look.shape == beside.shape) == (
                varied.groups.get(run) == varied.groups.get(other)
            )


def test_a_released_model_has_the_learning_rates_that_are_known(branched, study, tmp_path):
    """One of three checkpoints has no known tokens, and one no known learning rate."""
    _, rows, _ = branched
    known = [(10, 1e9, 2e-4), (20, None, 3e-4), (30, 3e9, None)]
    revisions = tuple(ReleasedRevision(name=f"r{step}", step=step) for step, _, _ in known)
    run = ReleasedRun(name="stage1", model="model", source="somebody/model", revisions=revisions)
    released = study.model_copy(update={"runs": (run,), "soups": (), "labels": {}})
    stage = [
        Row.of({**row, "run": "stage1", "phase": "stage1", "step": step, "tokens": tokens, "learning_rate": rate})
        for row, (step, tokens, rate) in zip(rows, known, strict=False)
    ]  # fmt: skip
    canvas = Canvas(released, stage, tmp_path)
    assert canvas.tokens.unit == "billion"
    assert [
        (row[canvas.tokens.label], row["learning rate / its peak"]) for row in canvas.rates
    ] == [(1.0, pytest.approx(2 / 3))]
    line = canvas.along(DIVERGENCE_AXIS, f"quant/{SPEC}/kl_divergence", "")
    assert [row[canvas.tokens.label] for row in line] == [1.0, 3.0]
    assert list(canvas.last_rows(f"quant/{SPEC}/kl_divergence")) == ["stage1"]


def test_many_panels_are_wrapped():
    assert [columns_of(count) for count in (1, 2, 3, 4, 5, 6, 9)] == [1, 2, 3, 4, 3, 3, 3]


def test_bars_that_reach_zero_end_at_the_axis_of_logarithms(branched):
    """Values at or below zero have no place there at all."""
    study, rows, directory = branched
    reaching = [Row.of({**row, "curvature/trace_low": -1.0}) for row in rows]
    negative = [Row.of({**row, "curvature/trace": -1.0}) for row in rows]
    for changed, kind in ((rows, "log"), (reaching, "log"), (negative, "linear")):
        panel = chart_of(drawn(curvature, Canvas(study, changed, directory)))["concat"][0]
        scales = [
            layer["encoding"]["y"]["scale"].get("type", "linear")
            for layer in layers_of(panel)
            if "Trace" in layer.get("encoding", {}).get("y", {}).get("field", "")
        ]
        assert set(scales) == {kind}
    spec = chart_of(drawn(curvature, Canvas(study, reaching, directory)))
    picture = vl_convert.vegalite_to_svg(json.dumps(spec))
    assert "NaN" not in picture
    assert "Infinity" not in picture


def test_a_study_at_work_is_drawn_as_far_as_it_is(branched):
    """Before anything is measured there is nothing but the learning rates, which are not data."""
    study, rows, directory = branched
    nothing = [
        Row.of(
            {key: None if key.startswith(("quant", "curv", "held")) else row[key] for key in row}
        )
        for row in rows
    ]
    shown, empty = draw_all(Canvas(study, nothing, directory))
    assert [figure.name for figure in shown] == ["losses"], "whose data are those of training"
    assert set(empty) == {figure.name for figure in figures_of(study)} - {"losses"}
    assert set(empty) >= {"quantization_error", "kl_divergence", "ends", "curvature"}
    half = [row if row["run"] == "stable" else no for row, no in zip(rows, nothing, strict=True)]
    assert kl_divergence.draw(Canvas(study, half, directory)) is not None


def test_a_quantity_names_its_column_with_its_unit():
    loss = Quantity("loss", "nats/token")
    assert loss.values(1.0, (0.5, 2.0)) == {
        "loss, nats/token": 1.0,
        "loss, nats/token, low": 0.5,
        "loss, nats/token, high": 2.0,
    }
    assert not loss.logarithmic_for([loss.values(0.0, (-1.0, 2.0))]).is_log
    assert loss.logarithmic_for([loss.values(1.0, (0.0, 2.0))]).is_log


def test_the_figure_of_averages_holds_every_model(collected_dir, study):
    rows = table_of(collected_dir, study)
    drawing = drawn(averages, Canvas(study, rows, collected_dir))
    names = {look.label: run for run, look in runs_of(study).looks.items()}
    for panel, name in zip(
        chart_of(drawing)["concat"],
        ("cross_entropy", "cross_entropy_quantized", "relative_error", "kl_divergence"),
        strict=True,
    ):
        shown = data_of(panel)
        labels = ("loss", "quantized loss", "relative error", "KL")
        y = next(key for key in shown[0] if key.startswith(labels))
        scale = {"relative_error": 100, "kl_divergence": 1000}.get(name, 1)
        # two soups are told by their names
        soups = {soup: soup for soup in ("soup-stable", "soup-anneal")}
        kinds = {"weights": None, "LAWA": "lawa5x16", **soups}
        values = [(names[row["run"]], kinds[row["series"]], row["step"], row[y]) for row in shown]
        expected = [
            (row["run"], row["average"], row["step"], scale * row[f"quant/{SPEC}/{name}"])
            for row in rows
        ]
        assert sorted(map(str, values)) == sorted(map(str, expected))
        shapes = [
            layer["encoding"]["shape"]
            for layer in layers_of(panel)
            if "shape" in layer.get("encoding", {})
        ]
        assert [shape["field"] for shape in shapes] == ["series"]
        reach = next(
            layer["encoding"]["y"]["scale"].get("domain")
            for layer in layers_of(panel)
            if layer.get("encoding", {}).get("y", {}).get("field") == y
        )
        if reach:
            averaged = [row[y] for row in shown if row["series"] != "weights"]
            assert all(reach[0] < value < reach[1] for value in averaged), "outside of the frame"


def test_the_figure_holds_every_method_of_every_run(study_dir, study):
    (study_dir / "lr3e-2/hf/step00000640/quant/awq-b3-g32/result.json").unlink()
    rows = table_of(study_dir, study)
    drawing = drawn(methods, Canvas(study, rows, study_dir))
    specs = {spec_title(spec): spec for spec in shown_methods(study)}
    assert len(specs) == 10
    left, right = chart_of(drawing)["concat"]
    names = {look.label: run for run, look in runs_of(study).looks.items()}
    last = {row["run"]: row for row in rows if row["step"] == 640 and row["average"] is None}
    for panel, measure in zip((left, right), ERRORS, strict=True):
        shown = data_of(panel)
        assert len(shown) == 10 * 4 - 1
        for row in shown:
            column = measure.of(specs[row["method"]])
            values = [row[AXES[measure].label + end] for end in ("", ", low", ", high")]
            known = last[names[row["run"]]]
            ends = [known[column + end] for end in ("", "_low", "_high")]
            assert values == [AXES[measure].scale * end for end in ends]


def test_the_fonts_of_a_slice_are_none_that_publishers_refuse(study_dir, study):
    pdf = pictures_of(drawn(slices, Canvas(study, [], study_dir)).chart)["pdf"]
    kinds = set(re.findall(rb"/Subtype /(Type[0-9]|TrueType)", pdf))
    assert kinds == {b"Type0"}
    assert pdf == pictures_of(drawn(slices, Canvas(study, [], study_dir)).chart)["pdf"]


def change(path, factor: float) -> None:
    """All losses over the first point's, times a factor."""
    with edited(path) as content:
        base, grid = content["measured"]["points"][0]["loss"], content["measured"]["grid"]
        grid["loss"] = [[base + factor * (loss - base) for loss in row] for row in grid["loss"]]


def test_slices_share_one_scale_of_colours_and_have_their_points(study_dir, study):
    for run, factor in zip(study.runs, (1, 0.5, 0.1, 0.02), strict=True):
        change(study_dir / slice_result(run, SPEC), factor)
    drawing = drawn(slices, Canvas(study, [], study_dir))
    assert isinstance(drawing.chart, Picture)
    panels = drawing.chart.axes[: len(study.runs)]
    levels = [
        next(
            tuple(contours.levels)
            for contours in axis.collections
            if isinstance(contours, ContourSet)
        )
        for axis in panels
    ]
    assert len(set(levels)) == 1
    # the highest is 0.08 x 4 + 0.002 x 36 - 0.0005 x 6 = 0.389
    assert levels[0][-1] == 0.5
    titles = [axis.get_title(loc="left") for axis in panels]
    assert titles == [f"peak learning rate {run.optimizer.peak_lr:g}" for run in study.trained]
    step = math.hypot(0.1, 4.0)  # distances are in its lengths
    places = {
        "base": (0.0, 0.0),
        "previous": pytest.approx((1.0 / step, 0.0)),
        "quantized": pytest.approx((0.1 / step, 4.0 / step)),
    }
    assert len({(axis.get_xlim(), axis.get_ylim()) for axis in panels}) == 1
    for axis in panels:
        marked = {
            line.get_marker(): tuple(float(np.asarray(data)[0]) for data in line.get_data())
            for line in axis.get_lines()
        }
        assert marked == dict(zip(MARKERS, places.values(), strict=True))
        text = next(label.get_text() for label in axis.texts if "\n" in label.get_text())
        # 0.08 at the one; 0.0008 + 0.032 - 0.002 at the other
        assert "+80.0 \N{PLUS-MINUS SIGN} 4.0" in text
        assert "+30.8 \N{PLUS-MINUS SIGN} 4.0" in text


def test_a_picture_is_drawn_of_a_chart_of_which_a_run_is_hidden(branched):
    """The page hides a run by the signal that the chart declares."""
    study, rows, directory = branched
    chart = chart_of(drawn(kl_divergence, Canvas(study, rows, directory)))
    pictures = pictures_of(chart)
    label = runs_of(study).looks["stable"].label
    without = pictures_of(chart | {"params": [{"name": HIDDEN, "value": [label]}]})["png"]
    assert pictures["png"] != without
    assert pictures["pdf"].startswith(b"%PDF")


def test_accuracy_is_drawn_task_by_task_and_in_the_mean(study_dir, study):
    settings = TasksSettings(specs=(SPEC,), tasks="piqa,sciq")
    measured = study.model_copy(update={"tasks": settings})
    column = f"tasks/{SPEC}"
    values: dict[str, Any] = {f"{column}/degradation": 0.1, f"{column}/piqa/degradation": 0.2}
    values |= {f"{name}_{end}": 0.05 for name in values for end in ("low", "high")}
    values |= {f"{column}/sciq/degradation": None}
    values |= {"study": "s", "phase": "anneal", "step": 640, "tokens": 1}
    rows = [Row.of(values | {"run": run.name}) for run in study.runs]
    drawing = drawn(tasks, Canvas(measured, rows, study_dir))
    assert [row["task"] for row in drawing.rows] == ["mean of the tasks"] * 4 + ["piqa"] * 4
    label = next(key for key in drawing.rows[0] if key.startswith("accuracy lost"))
    assert {row[label] for row in drawing.rows} == {10, 20}, "in percent"
