"""The figures of arXiv 2510.06213 as recipes draw them, of made-up tables, and their captions."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import pytest
import vl_convert

from dynamics.figures.averages import averages
from dynamics.figures.curvature import curvature, error_against_curvature
from dynamics.figures.ends import ends
from dynamics.figures.losses import full_against_quantized, losses
from dynamics.figures.quantization import quantization_error
from dynamics.recipes.captions import RELEASED as CAPTIONS
from dynamics.recipes.captions import of_released
from study.content import loaded
from study.definition import Study
from study.figures.figure import Figure, figures_of
from study.figures.looks import GREY, TRUNK, runs_of
from study.recipes.parts import PROFILES
from study.recipes.resolve import named_recipe, recipe_names, resolve
from study.released import ReleasedRevision, ReleasedRun
from tests.dynamics.drawing import chart_of, drawn
from tests.dynamics.families import OLMO2, lay_out, olmo2, study_of
from tests.dynamics.made_up import canvas_of

# recipe, figure here, and how its caption begins
BEGINNINGS = [
    ("pythia-160m-lr", "quantization_error", "Figure 3a of"),
    ("pythia-160m-lr", "full_against_quantized", "Figures 3b (4 bits) and 3c (3 bits) of"),
    ("pythia-160m-lr", "curvature", "Figure 6 of"),
    ("pythia-160m-budgets", "quantization_error", "The figure of token budgets of"),
    ("pythia-160m-budgets", "losses", "The figure of token budgets of"),
    ("pythia-160m-schedules", "quantization_error", "The comparison of cosine and WSD"),
    ("pythia-160m-lawa", "averages", "Figures 4a (full precision), 4b (3 bits) and 4c"),
    ("pythia-160m-weight-decay", "ends", "Figure 19 of"),
    ("pythia-160m-decay", "quantization_error", "Figure 20 of"),
    ("pythia-70m-kumar", "ends", "Figure 5 of"),
    ("olmo2-7b-lr", "quantization_error", "Figure 23a of"),
    ("olmo2-7b-lr", "full_against_quantized", "Figures 23b (4 bits) and 23c (3 bits) of"),
    ("olmo2-7b-lr-cosine300b", "quantization_error", "The OLMo2-7B ablation of the workshop"),
    ("tiny", "full_against_quantized", "Figures 23b (4 bits) and 23c (3 bits) of"),
]
RELEASED = {
    "HuggingFaceTB/SmolLM3-3B-checkpoints": {
        "losses": "Figure 1a",
        "quantization_error": "Figures 1b (3 bits) and 1c (4 bits)",
    },
    "allenai/OLMo-2-1124-7B": {"quantization_error": "Figure 2"},
    "allenai/OLMo-1B-hf": {},
    "allenai/OLMo-2-0325-32B": {"quantization_error": "Figure 2"},
    "LLM360/Amber": {"quantization_error": "Figure 12"},
    "swiss-ai/Apertus-8B-2509": {"quantization_error": "Figure 13"},
}
OF_OTHERS = ("-interventions", "-optimizers")  # of other papers
TRAINING = [
    name
    for name in recipe_names()
    if not named_recipe(name).takes_settings and not name.endswith(OF_OTHERS)
]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("recipe", TRAINING)
def test_every_figure_that_has_a_caption_is_one_of_the_study(recipe, profile):
    whole = resolve(recipe, profile)
    for study in [whole.part(each) for each in whole.experiments] or [whole]:
        assert study.captions
        # The absolute error has a figure where it is shown first.
        absolute = study.quantization.model_copy(update={"measure": "absolute_error"})
        shown = study.model_copy(update={"quantization": absolute})
        assert study.captions.keys() <= {figure.name for figure in figures_of(shown)}
        for caption in study.captions.values():
            assert re.match(r"(Figures? \d|The ).* arXiv:2510\.06213(,|;|$)", caption)


@pytest.mark.parametrize(("recipe", "figure", "beginning"), BEGINNINGS)
def test_captions_begin_with_the_figure_of_the_paper(recipe, figure, beginning):
    for profile in PROFILES:
        assert resolve(recipe, profile).captions[figure].startswith(beginning)


def test_slices_have_a_caption_where_they_are_measured():
    assert resolve("pythia-160m-lr").captions["slices"].startswith("Figure 8 of")


def test_captions_of_released_models_follow_the_family():
    for repository, beginnings in RELEASED.items():
        captions = of_released([repository])
        for figure, beginning in beginnings.items():
            of_figure_2 = ", which has one width and 4 models, here 1"
            part = of_figure_2 if beginning == "Figure 2" else ""
            assert captions[figure] == f"{beginning} of arXiv:2510.06213{part}"
        assert "full_against_quantized" not in captions
    # Its panels are of OLMo-1B, OLMo2-1B and OLMo2-7B.
    averaged = {"allenai/OLMo-1B-hf", "allenai/OLMo-2-1124-7B"}
    for repository in RELEASED:
        of_averages = of_released([repository], averaged=True).get("full_against_quantized", "")
        assert of_averages.startswith("The figure of averages") == (repository in averaged)
    assert not of_released(["EleutherAI/pythia-160m"], averaged=True)
    assert not of_released(["allenai/OLMo-2-1124-7B", "LLM360/Amber"])


def test_downloads_have_the_captions_of_their_repository(tmp_path, tokenizer_dir):
    """Two sizes of OLMo 2, each a directory on this machine."""
    sources = [lay_out(tmp_path, name, olmo2(name), tokenizer_dir) for name in OLMO2[:2]]
    captions = study_of(*sources).captions
    figure_2 = "Figure 2 of arXiv:2510.06213, which has one width"
    assert captions["quantization_error"] == f"{figure_2} and 4 models, here 2"
    checkpoints = "allenai/OLMo-2-0425-1B-early-training"
    whole = [checkpoints, *(f"allenai/{name}" for name in OLMO2)]
    assert of_released(whole)["quantization_error"] == figure_2
    figures: list[Figure] = loaded("figures")
    for captions in CAPTIONS.values():
        assert captions.keys() <= {figure.name for figure in figures}


@pytest.mark.parametrize("profile", PROFILES)
def test_captions_of_what_the_papers_settings_add(profile):
    study = resolve("olmo2-30m-lr", profile, ("settings=paper",))
    added = study.captions.keys() - resolve("olmo2-30m-lr", profile).captions.keys()
    assert added <= {figure.name for figure in figures_of(study)}
    assert added == {"methods_along_training"} | (
        {"accuracy_degradation"} if profile == "full" else set()
    )


def parts_of(chart: dict) -> Iterator[dict]:
    """The chart and all charts in it."""
    yield chart
    for part in (*chart.get("layer", ()), *chart.get("concat", ())):
        yield from parts_of(part)


def axes_of(chart: dict, label: str) -> list[dict]:
    """The encodings of a quantity wherever it is on an axis."""
    return [
        encoding
        for part in parts_of(chart)
        for name, encoding in part.get("encoding", {}).items()
        if name in ("x", "y") and encoding.get("field") == label
    ]


def links_of(panel: dict) -> list[dict]:
    """The ends of the lines from checkpoints that branches or stages start from to their own."""
    values = [part["data"]["values"] for part in parts_of(panel) if "data" in part]
    return [
        row
        for rows in values
        for row in rows
        if {"run", "series"} <= row.keys() and "panel" not in row
    ]


def svg_of(chart: dict) -> ET.Element:
    return ET.fromstring(vl_convert.vegalite_to_svg(json.dumps(chart)))


def lines_of(picture: ET.Element) -> list[ET.Element]:
    """The lines of the panels that have a length, without those of the legend."""
    return [
        path
        for group in picture.iter()
        if "mark-line" in group.get("class", "")
        for path in group
        if path.get("stroke") and "L" in path.get("d", "")
    ]


def dashes_of(picture: ET.Element) -> set[str]:
    dashes = {path.get("stroke-dasharray", "1,0") for path in lines_of(picture)}
    return {"solid" if dash == "1,0" else dash for dash in dashes}


FULL, QUANTIZED = "full-precision loss, nats/token", "quantized loss, nats/token"


def test_quantized_against_full_loss_has_equal_axes_and_the_line_between(tmp_path):
    study = resolve("pythia-160m-lr", "full")
    canvas = canvas_of(tmp_path, study)
    panels = chart_of(drawn(full_against_quantized, canvas))["concat"]
    assert [panel["title"] for panel in panels] == [
        ["GPTQ, 4 bits, groups of 128"],
        ["GPTQ, 3 bits, groups of 128"],
    ]
    names = {look.label: run for run, look in canvas.runs.looks.items()}
    rows = {(row["run"], row["step"]): row for row in canvas.table}
    for panel, spec in zip(panels, ("gptq-b4-g128", "gptq-b3-g128"), strict=True):
        assert panel["width"] == panel["height"]
        (domain,) = {
            tuple(axis["scale"]["domain"])
            for label in (FULL, QUANTIZED)
            for axis in axes_of(panel, label)
        }
        ends_of_line = [{FULL: end, QUANTIZED: end} for end in domain]
        dashed = [part for part in parts_of(panel) if part.get("mark", {}).get("strokeDash")]
        assert [part["data"]["values"] for part in dashed] == [ends_of_line]

        shown = panel["layer"][-1]["data"]["values"]
        late = {
            at for at, row in rows.items()
            if row["tokens"] >= 49.8e9 or row["run"].endswith("-control")
        }  # fmt: skip
        assert {(names[row["run"]], row["step"]) for row in shown} == late
        for row in shown:
            values = rows[names[row["run"]], row["step"]]
            column = f"quant/{spec}/cross_entropy"
            assert (row[FULL], row[QUANTIZED]) == (values[column], values[f"{column}_quantized"])
            assert domain[0] < row[FULL] < row[QUANTIZED] < domain[1]


def test_the_line_of_equal_losses_is_drawn_from_corner_to_corner(tmp_path):
    study = resolve("pythia-160m-lr", "smoke")
    chart = chart_of(drawn(full_against_quantized, canvas_of(tmp_path, study)))
    picture = svg_of(chart)
    assert ["".join(text.itertext()) for text in picture.iter()].count("x = y") >= 2
    size = chart["concat"][0]["width"]
    corners = [path.get("d") for path in lines_of(picture) if path.get("stroke") == "#555555"]
    assert corners == [f"M0,{size}L{size},0"] * 2


def test_averages_are_open_points_beside_the_weights(tmp_path):
    canvas = canvas_of(tmp_path, resolve("pythia-160m-lawa", "full"))
    *_, of_averages = chart_of(drawn(full_against_quantized, canvas))["concat"][1]["layer"]
    marks = [part["mark"] for part in parts_of(of_averages) if "mark" in part]
    fills = [mark.get("fill") for mark in marks if mark["type"] == "point"]
    assert fills == [None, "#ffffff"]
    assert not [mark for mark in marks if mark["type"] == "line"]
    shown = [row["step"] for row in of_averages["data"]["values"]]
    assert shown == [
        row["step"] for row in canvas.table if row["average"] and row["tokens"] >= 49.8e9
    ]


def test_lawa_is_a_dashed_dense_curve_beside_cooldowns_that_leave_the_constant_rate(tmp_path):
    """The axis has one scale of dashes, so that one more domain took LAWA's away once."""
    canvas = canvas_of(tmp_path / "full", resolve("pythia-160m-lawa", "full"))
    drawing = drawn(averages, canvas)
    panels = chart_of(drawing)["concat"]
    assert [panel["title"][0].split(",")[0] for panel in panels[:3]] == [
        "Full precision",
        *["GPTQ"] * 2,
    ]
    of_lawa = [row for row in drawing.rows if row["series"] == "LAWA"]
    lawa = [row["tokens"] for row in of_lawa if row["panel"] == "Full precision"]
    assert lawa[0] / 1e9 == pytest.approx(8.4, abs=0.1)
    assert lawa[-1] / 1e9 == pytest.approx(99.6, abs=0.1)
    assert len(lawa) >= 20

    weights = [row for row in canvas.table if row["run"] == "stable" and not row["average"]]
    stable = {row["step"]: row for row in weights}
    starts = links_of(panels[2])[::2]
    left = [stable[step] for step in (40_000, 80_000, 120_000, 152_000)]
    assert [row[canvas.tokens.label] for row in starts] == [row["tokens"] / 1e9 for row in left]
    assert [row["relative error of the loss, %"] for row in starts] == [
        100 * row["quant/gptq-b3-g128/relative_error"] for row in left
    ]

    small = canvas_of(tmp_path / "small", resolve("pythia-160m-lawa", "smoke"))
    lines = lines_of(svg_of(chart_of(drawn(averages, small))))
    constant = [path.get("stroke-dasharray", "") for path in lines if path.get("stroke") == TRUNK]
    # in every panel the weights, LAWA and the learning rate
    assert sorted(constant) == [*["1,0"] * 4, *["1,2"] * 4, *["5,3"] * 4]


def released(study: Study, *stages: ReleasedRun) -> Study:
    changes = {"runs": stages, "soups": (), "labels": {}, "averaged_steps": (), "captions": {}}
    return study.model_copy(update=changes)


def stage(name: str, *tokens: int, rate: float = 1.0, **more: Any) -> ReleasedRun:
    revisions = tuple(
        ReleasedRevision(name=f"{name}-{at}", step=at, tokens=at * 10**9, learning_rate=rate * 1e-3)
        for at in tokens
    )
    return ReleasedRun(
        name=name, source="somebody/model", model="model", revisions=revisions, **more
    )


STABLE, DECAY = (
    stage("stage1", 50, 400, 800),
    stage("stage2", 900, 1000, rate=0.3, parent="stage1"),
)
SOUP = stage("main", 1000, rate=0, average_of=("stage2",))


def test_of_one_model_the_widths_are_dashes_in_one_panel(study, tmp_path):
    """Figure 1a: three lines along tokens, and the stages joined."""
    canvas = canvas_of(tmp_path, released(study, STABLE, DECAY, SOUP))
    drawing = drawn(losses, canvas)
    (panel,) = chart_of(drawing)["concat"]
    table = {(row["run"], row["step"]): row for row in canvas.table}
    series = {
        "full precision": "quant/gptq-b3-g32/cross_entropy",
        "GPTQ, 4 bits, groups of 32": "quant/gptq-b4-g32/cross_entropy_quantized",
        "GPTQ, 3 bits, groups of 32": "quant/gptq-b3-g32/cross_entropy_quantized",
    }
    label = "held-out loss, nats/token"
    for name, column in series.items():
        shown = [row for row in drawing.rows if row["series"] == name]
        expected = [(row["tokens"] / 1e9, row[column]) for row in table.values()]
        assert [(row[canvas.tokens.label], row[label]) for row in shown] == expected
    picture = svg_of(chart_of(drawing))
    # every width has its dash, in the line of a stage and in the link between two
    assert dashes_of(picture) == {"solid", "6,3", "8,2,2,2", "1,2"}
    assert panel["width"] == 560
    assert [row[canvas.tokens.label] for row in links_of(panel)] == [800, 900] * 3


def test_every_width_of_one_model_has_a_dash_of_its_own(study, tmp_path):
    specs = tuple(f"gptq-b{bits}-g32" for bits in (2, 3, 4, 8))
    quantization = study.quantization.model_copy(update={"specs": specs})
    widths = released(study, STABLE, DECAY).model_copy(update={"quantization": quantization})
    picture = svg_of(chart_of(drawn(losses, canvas_of(tmp_path, widths))))
    # full precision, the four, and the learning rate
    assert len(dashes_of(picture)) == 6


def test_points_of_a_released_model_have_one_size(study, tmp_path):
    """Its phases are its stages, so no name says which of them anneal."""
    canvas = canvas_of(tmp_path, released(study, STABLE, DECAY))
    for figure in (error_against_curvature, full_against_quantized):
        encodings = [part.get("encoding", {}) for part in parts_of(chart_of(drawn(figure, canvas)))]
        sizes = [encoding["size"] for encoding in encodings if "size" in encoding]
        assert sizes
        assert not [size for size in sizes if "condition" in size]


def test_of_several_models_every_width_has_its_panel_on_one_scale(study, tmp_path):
    other = STABLE.model_copy(update={"name": "another", "model": "another"})
    canvas = canvas_of(tmp_path, released(study, STABLE, DECAY, other))
    panels = chart_of(drawn(losses, canvas))["concat"]
    titles = ["Full precision", "GPTQ, 4 bits, groups of 32", "GPTQ, 3 bits, groups of 32"]
    assert [panel["title"] for panel in panels] == [[title] for title in titles]
    scales = [
        json.dumps(axis["scale"])
        for panel in panels
        for axis in axes_of(panel, "held-out loss, nats/token")
    ]
    (scale,) = set(scales)
    losses_of = [row["quant/gptq-b3-g32/cross_entropy_quantized"] for row in canvas.table]
    # the first loss, far above the others, is above the axis
    low, high = json.loads(scale)["domain"]
    assert sorted(loss for loss in losses_of if not low < loss < high) == [max(losses_of)] * 2


def test_of_trained_runs_every_evaluation_is_drawn_too(tmp_path):
    canvas = canvas_of(tmp_path, resolve("pythia-160m-budgets", "smoke"), evaluations=12)
    *_, last = chart_of(drawn(losses, canvas))["concat"]
    assert last["title"] == ["Full precision, while training"]
    (evaluations,) = [
        part["data"]["values"]
        for part in parts_of(last)
        if part.get("encoding", {}).get("y", {}).get("field", "").startswith("held-out loss")
    ]
    runs = {look.label for look in canvas.runs.looks.values()}
    assert {row["run"] for row in evaluations} == runs
    assert len(evaluations) > len([row for row in canvas.table if not row["average"]])


def test_learning_rates_that_runs_share_are_grey_where_others_have_their_own(tmp_path):
    canvas = canvas_of(tmp_path, resolve("olmo2-7b-lr", "full"))
    assert {bool(row["run"]) for row in canvas.rates} == {True, False}
    picture = svg_of(chart_of(drawn(quantization_error, canvas)))
    dotted = [path for path in lines_of(picture) if path.get("stroke-dasharray") == "1,2"]
    curves = {row["schedule"]: row["run"] for row in canvas.rates}
    # in each of the two panels
    assert len(dotted) == 2 * len(curves)
    grey = [path for path in dotted if path.get("stroke") == GREY]
    assert len(grey) == 2 * len([run for run in curves.values() if not run])


def test_the_constant_rate_has_the_colour_of_no_budget():
    looks = runs_of(resolve("pythia-160m-budgets")).looks
    assert looks["stable"].colour == TRUNK
    assert looks["stable"].label == "constant rate"
    assert TRUNK not in {look.colour for run, look in looks.items() if run != "stable"}
    of_sweep = runs_of(resolve("pythia-160m-lr")).looks
    assert TRUNK not in {look.colour for look in of_sweep.values()}


def test_the_error_is_beside_trace_and_eigenvalue(tmp_path):
    canvas = canvas_of(tmp_path, resolve("pythia-160m-budgets", "smoke"))
    drawing = drawn(curvature, canvas)
    titles = ["Trace of the Hessian", "Largest eigenvalue of the Hessian"]
    panels = chart_of(drawing)["concat"]
    assert [panel["title"] for panel in panels] == [
        [each] for each in (*titles, "GPTQ, 3 bits, groups of 32")
    ]
    shown = [row for row in drawing.rows if row["panel"].startswith("GPTQ")]
    assert sorted(row["relative error of the loss, %"] for row in shown) == sorted(
        100 * row["quant/gptq-b3-g32/relative_error"] for row in canvas.table
    )


def test_budgets_have_a_series_per_schedule(tmp_path):
    """Figure 5: a point for each budget, of a cosine of its own and of a cooldown."""
    canvas = canvas_of(tmp_path, resolve("pythia-70m-kumar", "full"))
    drawing = drawn(ends, canvas)
    table = {(row["run"], row["step"]): row for row in canvas.table}
    panels = chart_of(drawing)["concat"]
    axis = "budget, billion tokens"
    shown = [
        row
        for row in drawing.rows
        if row["panel"] == "GPTQ, 4 bits, groups of 128" and "relative error of the loss, %" in row
    ]
    for group, kind in (("cosine", "cosine"), ("WSD", "wsd")):
        points = [
            (round(row[axis], 1), row["relative error of the loss, %"])
            for row in shown
            if row["group"] == group
        ]
        assert points == [
            (
                pytest.approx(step * 524_288 / 1e9, abs=0.06),
                100 * table[f"{kind}-{tokens}b", step]["quant/gptq-b4-g128/relative_error"],
            )
            for step, tokens in ((23_750, 12.5), (47_500, 24.9), (95_000, 49.8), (190_000, 99.6))
        ]
    assert {each["axis"]["format"] for each in axes_of(panels[0], axis)} == {".3~g"}
