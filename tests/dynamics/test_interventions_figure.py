"""The figure of arms: means, differences and lines against sums of the results that were written."""

import pytest

from dynamics.figures.ends import anneal_against_control
from dynamics.figures.interventions import has_arms, interventions
from dynamics.recipes import interventions as recipe
from study.definition import Study
from study.figures.canvas import Canvas
from study.figures.figure import figures_of
from study.measurements.quantization import QuantizationSettings
from study.recipes.resolve import resolve
from study.results.table import Row
from tests.dynamics.drawing import chart_of, drawn, layers_of
from tests.study import synthetic
from tests.study.synthetic import held_out_loss, relative_error, table_of, write_study
from train.run.config import RunConfig

SPECS = ("gptq-b3-g32", "gptq-b4-g32")
SEEDS = (1, 2)
LOSS, QUANTIZED = "full-precision loss, nats/token", "quantized loss, nats/token"
KL = "KL divergence, 10^-3 nats/token"
ADDED = {"qat": 0.04, "noise": 0.02, "sam": 0.01}  # to the loss, by the kind of perturbation


def changed_loss(run: RunConfig, step: int) -> float:
    """Another one for every arm and seed."""
    kind = run.perturbation.kind if run.perturbation else ""
    return held_out_loss(run, step) + ADDED.get(kind, 0.0) * run.seed


@pytest.fixture(scope="module")
def canvas(tmp_path_factory) -> Canvas:
    settings = QuantizationSettings(
        specs=SPECS, calibration_sequences=16, eval_tokens=12_288, block_tokens=12_288
    )
    study = recipe.interventions(recipe.SMOKE, seeds=SEEDS, quantization=settings)
    study = study.model_copy(update={"name": "arms"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "held_out_loss", changed_loss)
        directory = write_study(tmp_path_factory.mktemp("arms") / study.name, study)
        rows = table_of(directory, study)
    return Canvas(study, rows, directory)


@pytest.fixture(scope="module")
def measured(canvas):
    return canvas.study, canvas.table, drawn(interventions, canvas)


def rows_of(drawing, title: str, arm: str, column: str = QUANTIZED) -> list[dict]:
    """The rows of an arm in one panel, by its label after the key."""
    return [
        row
        for row in drawing.rows
        if row["panel"] == title and row["arm"][3:] == arm and column in row
    ]


def test_there_is_a_mark_per_arm_and_average(measured):
    _, _, drawing = measured
    marks = [row["arm"] for row in drawing.rows if "key" in row]
    arms = list(dict.fromkeys(marks))
    assert [arm[3:] for arm in arms] == [
        "no anneal",
        "no anneal, LAWA",
        "no anneal, EMA",
        "no anneal, decay-equivalent average",
        "anneal 20%",
        "anneal 20%, LAWA",
        "anneal 20%, QAT rtn-b3-g32",
        "anneal 20%, QAT rtn-b3-g32, LAWA",
        "anneal 20%, gaussian noise of rtn-b3-g32",
        "anneal 20%, SAM rho 0.05",
        "anneal 20%, floor 10%",
        "anneal 50%",
    ]
    assert "".join(arm[0] for arm in arms) == "abcdefghijkl"
    assert len(marks) == 4 * len(arms), "two panels per spec"


def test_a_mark_is_the_mean_over_seeds(measured):
    study, _, drawing = measured
    end = study.trained[0].total_steps
    qat = [run for run in study.trained if run.name.startswith("anneal20-qat3-")]
    (mark,) = (
        row for row in rows_of(drawing, "GPTQ, 3 bits, groups of 32", "anneal 20%, QAT rtn-b3-g32") if "key" in row
    )  # fmt: skip
    losses = [changed_loss(run, end) for run in qat]
    assert mark[LOSS] == pytest.approx(sum(losses) / 2)
    quantized = [
        loss * (1 + relative_error(run, end, SPECS[0]))
        for loss, run in zip(losses, qat, strict=True)
    ]
    assert mark[QUANTIZED] == pytest.approx(sum(quantized) / 2)
    assert mark["seeds"] == 2
    # 1.1 times the increase, by `synthetic.per_document`
    (beside,) = (
        row
        for row in rows_of(drawing, "GPTQ, 3 bits, groups of 32", mark["arm"][3:], KL)
        if "key" in row
    )
    expected = [1.1 * (full - loss) for full, loss in zip(quantized, losses, strict=True)]
    assert beside[KL] == pytest.approx(1000 * sum(expected) / 2)


def test_bars_are_of_the_difference_from_the_control(measured):
    """All documents lose alike in full precision, so that seeds alone make its bar: two numbers."""
    study, _, drawing = measured
    title = "GPTQ, 4 bits, groups of 32"
    (control,) = (row for row in rows_of(drawing, title, "no anneal") if "key" in row)
    assert not [name for name in control if name.endswith((", low", ", high"))]
    (mark,) = (
        row
        for row in rows_of(drawing, title, "anneal 20%, gaussian noise of rtn-b3-g32")
        if "key" in row
    )
    end = study.trained[0].total_steps
    by_name = {run.name: run for run in study.trained}
    differences = [
        changed_loss(by_name[f"anneal20-noise3-seed{seed}"], end)
        - changed_loss(by_name[f"stable-seed{seed}"], end)
        for seed in SEEDS
    ]
    mean = sum(differences) / 2
    half = 12.7062 * abs(differences[0] - differences[1]) / 2  # Student's t, one degree of freedom
    assert mark[LOSS] - control[LOSS] == pytest.approx(mean)
    assert mark[f"{LOSS}, low"] == pytest.approx(control[LOSS] + mean - half, rel=1e-3)
    assert mark[f"{LOSS}, high"] == pytest.approx(control[LOSS] + mean + half, rel=1e-3)


def test_lines_are_the_checkpoints_of_the_control_and_of_its_usual_anneal(measured):
    _, _, drawing = measured
    title = "GPTQ, 3 bits, groups of 32"
    lines = [row for row in drawing.rows if row["panel"] == title and "key" not in row]
    steps = {
        arm: [row["step"] for row in lines if row["arm"][3:] == arm and QUANTIZED in row]
        for arm in dict.fromkeys(row["arm"][3:] for row in lines)
    }
    # The anneal over 20% starts at step 32 of 40; that over 50% has no perturbed run beside it.
    both = [32, 35, 37, 40]
    assert steps == {"no anneal": both, "anneal 20%": both}
    starts = [row for row in lines if row["step"] == 32 and QUANTIZED in row]
    assert starts[0][LOSS] == starts[1][LOSS], "both leave one checkpoint"


def test_averages_are_open_and_all_panels_have_a_legend_of_arms(measured):
    _, _, drawing = measured
    chart = chart_of(drawing)
    assert len(chart["concat"]) == 4
    assert chart["columns"] == 2
    text = str(chart)
    assert "datum.average !== ''" in text
    assert text.count("'title': 'arm'") > 0


def test_long_labels_below_an_axis_are_steep(canvas):
    left, _ = chart_of(drawn(anneal_against_control, canvas))["concat"]
    angles = {
        layer["encoding"]["x"]["axis"]["labelAngle"]
        for layer in layers_of(left)
        if "axis" in layer.get("encoding", {}).get("x", {})
    }
    assert angles == {-35}


def without(rows: list[Row], run: str) -> list[Row]:
    return [row for row in rows if not row["run"].startswith(run)]


def test_what_is_not_measured_yet_is_left_out(measured, tmp_path):
    study, rows, _ = measured
    empty = Canvas(study, without(rows, "stable"), tmp_path)
    assert interventions.draw(empty) is None, "no control, no bar"


@pytest.mark.parametrize(
    ("name", "expected"), [("tiny", False), ("olmo2-7b-lr", False), ("tiny-interventions", True)]
)
def test_studies_with_several_anneals_of_one_control_and_end_have_it(name, expected):
    study: Study = resolve(name)
    assert has_arms(study) is expected
    assert ("interventions" in {figure.name for figure in figures_of(study)}) is expected
