"""Legends, and the scales that the panels of a figure share, in the charts as Vega draws them."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import vl_convert
from matplotlib.figure import Figure as Picture

from dynamics.figures.averages import averages
from study.figures.canvas import Canvas
from study.figures.figure import Drawn, figures_of
from study.figures.looks import DASHED, NOBODY, SOLID, STROKES, TRUNK, colours, runs_of
from study.measurements.curvature import RELATIVE
from study.recipes.parts import sweep
from study.recipes.resolve import resolve
from study.results.table import Row
from tests.present import present
from tests.study import factors
from tests.study.synthetic import table_of, write_study
from train.run.optimization import Lawa

MODELS = {"weights", "LAWA"}
# What the legend names instead of the groups of the runs, or beside them.
OTHERS = {"anneal_against_control": {"annealed", "not annealed"}, "ends": {"annealed", "no anneal"}}
DRAWN = {  # of the study below, with seeds and without
    *("anneal_against_control", "kl_divergence", "quantization_error", "ends", "losses"),
    *("averages", "full_against_quantized", "curvature", "error_against_curvature", "blocks"),
    *("methods", "methods_along_training", "prediction"),
}


class Charts(NamedTuple):
    canvas: Canvas
    by_name: dict[str, Drawn]


def averaged(name: str, **values: Any) -> Any:
    lawa = Lawa(interval_steps=4, window=5)
    return factors.run(name, averages=(lawa,), **values)


@pytest.fixture(scope="module", params=[(), (1, 2)], ids=["one training each", "seeds"])
def charts(tmp_path_factory, request) -> Charts:
    study = factors.of("own", sweep(averaged, weight_decay=[0.0, 0.1]), seeds=request.param)
    study = study.model_copy(update={"averaged_steps": (48, 64)})
    directory = write_study(tmp_path_factory.mktemp("legends") / "own", study)
    canvas = Canvas(study, table_of(directory, study), directory)
    drawings = {figure.name: figure.draw(canvas) for figure in figures_of(study)}
    return Charts(canvas, {
        name: drawing
        for name, drawing in drawings.items()
        if drawing and not isinstance(drawing.chart, Picture)
    })  # fmt: skip


def legend_of(chart: Any) -> set[str]:
    """All labels of the legends of the picture."""
    picture = ET.fromstring(vl_convert.vegalite_to_svg(json.dumps(chart)))
    return {
        "".join(label.itertext())
        for group in picture.iter()
        if "role-legend-label" in group.get("class", "")
        for label in group
    }


def test_every_figure_names_the_runs_in_its_legend(charts):
    assert charts.by_name.keys() == DRAWN
    groups = set(charts.canvas.runs.groups)
    assert groups == {"0", "0, no anneal", "0.1", "0.1, no anneal"}
    for name, drawing in charts.by_name.items():
        expected = OTHERS.get(name, groups) | (MODELS if name == "averages" else set())
        assert legend_of(drawing.chart) == expected, name


def encodings_of(chart: Any) -> Iterator[tuple[str, Any]]:
    """All encodings of a chart and of the charts in it, by channel."""
    yield from chart.get("encoding", {}).items()
    for part in (*chart.get("layer", ()), *chart.get("concat", ())):
        yield from encodings_of(part)


def scales_of(drawing: Drawn, channel: str) -> set[str]:
    """Domain and range of all scales that a figure states for a channel, which Vega merges."""
    assert isinstance(drawing.chart, dict)
    return {
        json.dumps([encoding["field"], encoding["scale"]], sort_keys=True)
        for name, encoding in encodings_of(drawing.chart)
        if name == channel and encoding and "scale" in encoding
    }


@pytest.mark.parametrize("channel", ["color", "shape", "strokeDash"])
def test_panels_and_layers_that_share_a_scale_state_the_same_one(charts, channel):
    """Vega-Lite joins the domains of a shared scale and takes one of the ranges: looks are lost."""
    for name, drawing in charts.by_name.items():
        assert len(scales_of(drawing, channel)) <= 1, name


def scale_of(charts, figure: str, channel: str) -> dict[str, Any]:
    """The ranges by name of the one scale that the renderer makes of a channel of a figure."""
    compiled = vl_convert.vegalite_to_vega(json.dumps(charts.by_name[figure].chart))
    (scale,) = (each for each in compiled["scales"] if each["name"] == channel)
    return dict(zip(scale["domain"], scale["range"], strict=True))


@pytest.mark.parametrize("figure", ["kl_divergence", "averages"])
def test_controls_keep_their_dashes_in_every_figure(charts, figure):
    dashes = scale_of(charts, figure, "strokeDash")
    looks = charts.canvas.runs.looks.values()
    assert dashes.pop(NOBODY) == SOLID, "keeps this legend apart from that of the colours"
    assert dashes == {look.label: DASHED if look.is_dashed else SOLID for look in looks}


def test_averages_beside_dashed_controls_have_markers_of_their_own(charts):
    assert scale_of(charts, "averages", "shape") == {"weights": "circle", "LAWA": "square"}
    assert scale_of(charts, "averages", "strokeOpacity") == {"weights": 1, "LAWA": 1}


def test_colour_is_the_factor_and_dashes_are_the_control(charts):
    """No third mark says the same: all markers are alike, and the legend draws the dashes."""
    looks = charts.canvas.runs.looks
    assert {look.shape for look in looks.values()} == {"circle"}
    for run in charts.canvas.study.runs:
        if control := charts.canvas.study.control_of(run):
            assert looks[control.name].colour == looks[run.name].colour
            assert looks[control.name].symbol != looks[run.name].symbol
    compiled = vl_convert.vegalite_to_vega(json.dumps(charts.by_name["kl_divergence"].chart))
    (legend,) = compiled["legends"]
    drawn = legend["encode"]["symbols"]["update"]["shape"]["signal"]
    assert STROKES[True] in drawn
    assert STROKES[False] in drawn


def test_models_of_the_averages_look_alike_where_a_panel_lacks_one(tmp_path):
    """Curvature, here of the weights alone, has a panel beside those of every model."""
    study = factors.of("own", sweep(averaged, weight_decay=[0.0, 0.1]))
    curvature = present(study.curvature).model_copy(update={"averages": True})
    changed = study.model_copy(update={"averaged_steps": (64,), "curvature": curvature})
    rows = [
        Row.of(
            {**row, **dict.fromkeys((RELATIVE.name + end for end in ("", "_low", "_high")), 0.5)}
        )
        if row["average"] is None
        else row
        for row in table_of(write_study(tmp_path / "own", changed), changed)
    ]
    drawing = present(averages.draw(Canvas(changed, rows, tmp_path / "own")))
    assert [panel for panel in drawing.rows if panel["panel"] == "Curvature"]
    assert len(scales_of(drawing, "shape")) == len(scales_of(drawing, "strokeDash")) == 1


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.1."""
    shares = [int(part, 16) / 255 for part in re.findall("[0-9a-f]{2}", colour)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_every_colour_has_the_contrast_of_graphics_on_white(count):
    assert len(set(colours(count))) == count
    assert min(1.05 / (luminance(colour) + 0.05) for colour in colours(count)) >= 3


def test_arms_of_one_anneal_have_colours_of_their_own():
    """Seven arms anneal over a fifth of the tokens: the colour of a share would be that of all."""
    study = resolve("tiny-interventions", "full")
    looks = {entry: looks[0] for entry, looks in runs_of(study).groups.items()}
    assert len({look.colour for look in looks.values()}) == len(looks) == 11
    assert looks["no anneal"].colour == TRUNK


def test_the_first_figure_answers_the_pointer(charts):
    chart = charts.by_name["anneal_against_control"].chart
    tooltips = [encoding for name, encoding in encodings_of(chart) if name == "tooltip"]
    titles = [{line["title"] for line in lines} for lines in tooltips]
    assert len(titles) == 2
    assert "p, not corrected" in titles[1]
    assert all({"run", "step", "tokens", "seeds"} < title for title in titles)
