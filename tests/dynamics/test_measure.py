"""The error that a study shows first: figures, tables and the sentence of the report."""

from itertools import product
from typing import Any

import pytest

from dynamics.choices.arms import choice_line
from dynamics.figures.averages import averages
from dynamics.figures.ends import anneal_against_control
from dynamics.figures.quantization import (
    INCREASE_AXIS,
    LOST,
    accuracy_degradation,
    kl_divergence,
    methods_along_training,
)
from study.claims.verdict import Evidence
from study.definition import Study
from study.figures.canvas import Canvas
from study.figures.figure import figures_of
from study.measurements.tasks import TasksSettings
from study.measurements.titles import spec_title
from study.paths import MeasuredModel, hf_directory, result
from study.recipes.resolve import resolve
from study.report.report import intervals_note
from study.report.tables import average_table, effect_tables, end_table, method_table
from study.results.effects import effects_of
from study.results.paired import Paired
from study.results.summary import summarize
from tests.dynamics.drawing import chart_of, drawn
from tests.present import present
from tests.sealing import reseal
from tests.study.synthetic import table_of, write_study

# Figure beside the claims; title of its column; what it is of two losses.
SHOWN: dict[str, tuple[str, str, Any]] = {
    "kl_divergence": ("kl_divergence", "KL divergence", None),
    "relative_error": (
        "quantization_error",
        "relative error",
        lambda full, low: 100 * (low / full - 1),
    ),
    "absolute_error": ("absolute_error", "loss increase", lambda full, low: 1000 * (low - full)),
}


def showing(study: Study, measure: str, **changes: object) -> Study:
    """The study with another error first."""
    quantization = study.quantization.model_copy(update={"measure": measure} | changes)
    return study.model_copy(update={"quantization": quantization})


@pytest.mark.parametrize("measure", SHOWN)
def test_the_figure_of_the_measure_is_the_one_beside_the_claims(study, measure):
    changed = showing(study, measure)
    headlines = [each.name for each in figures_of(changed) if each.headline(changed)]
    assert headlines == [SHOWN[measure][0]]
    # The curve of the absolute error is drawn where it is asked for, and nowhere else.
    others = {each.name for each in figures_of(changed)} & {name for name, *_ in SHOWN.values()}
    assert others == {"kl_divergence", "quantization_error", SHOWN[measure][0]}


@pytest.mark.parametrize("measure", SHOWN)
def test_every_table_and_the_sentence_begin_with_it(study_dir, study, measure):
    changed, rows = showing(study, measure), table_of(study_dir, study)
    paired, summaries = Paired(study_dir), summarize(changed, rows)
    title = SHOWN[measure][1]
    head = end_table(changed, summaries, paired).head
    assert head[2].partition(",")[0] == title
    (effects,) = effect_tables(changed, effects_of(changed, rows, paired))
    assert effects.head[2].partition(",")[0] == title
    assert present(method_table(changed, summaries)).note.lower().startswith(title.lower())
    sentences = choice_line(Evidence(changed, rows, paired)).lower()
    assert f" by the {title.lower()} (" in sentences


@pytest.mark.parametrize("measure", ["relative_error", "absolute_error"])
def test_its_curve_and_that_of_other_methods_are_of_the_losses_in_the_table(
    study_dir, study, measure
):
    spec, other = study.quantization.specs[0], study.quantization.methods[0]
    changed = showing(study, measure, along=(other,))
    rows = table_of(study_dir, study)
    canvas = Canvas(changed, rows, study_dir)
    figures = {each.name: each for each in figures_of(changed)}
    name, _, of_losses = SHOWN[measure]
    ends = {(row["run"], row["step"]): row for row in rows if row["average"] is None}
    names = {look.label: run for run, look in canvas.runs.looks.items()}
    for figure, shown in ((figures[name], spec), (methods_along_training, other)):
        points = [row for row in drawn(figure, canvas).rows if row.get("series") == "weights"]
        assert points
        for row in points[: len(ends)]:
            measured = ends[names[row["run"]], row["step"]]
            losses = (
                measured[f"quant/{shown}/{which}"]
                for which in ("cross_entropy", "cross_entropy_quantized")
            )
            (value,) = (row[key] for key in row if key.startswith(("relative", "quantized -"))
                        and not key.endswith((", low", ", high")))  # fmt: skip
            assert value == pytest.approx(of_losses(*losses), rel=1e-6)


def test_the_difference_of_the_anneal_is_of_the_measure(tmp_path):
    """In percent where the error is; of the same two models otherwise."""
    smoke = resolve("tiny", "smoke")
    directory = write_study(tmp_path / smoke.name, smoke)
    rows = table_of(directory, smoke)
    for measure, scale, difference in (
        ("relative_error", 100, "annealed - not annealed, %"),
        ("absolute_error", 1000, "annealed - not annealed, 10^-3 nats/token"),
    ):
        changed = showing(smoke, measure)
        assert next(each.headline(changed) for each in figures_of(changed))
        shown = drawn(anneal_against_control, Canvas(changed, rows, directory)).rows
        of_figure = [row for row in shown if difference in row]
        ends = summarize(changed, rows)
        column = f"quant/gptq-b3-g32/{measure}"
        assert [row[difference] for row in of_figure] == pytest.approx(
            [scale * (present(end.last)[column] - present(end.control)[column]) for end in ends],
            rel=1e-6,
        )


def test_the_report_says_that_one_draw_is_in_no_interval(study_dir, study):
    rows = table_of(study_dir, study)
    words = "one draw of the text: no interval or p-value here holds the differences between draws"
    one = showing(study, "relative_error", calibration_seeds=1, documents="concatenated")
    several = showing(study, "relative_error", calibration_seeds=3)
    uncalibrated = showing(study, "relative_error", calibration_seeds=1, specs=("int8-t6",))
    assert words in intervals_note(one, rows)
    assert "the evaluation text has 28 blocks)" in intervals_note(one, rows)
    assert "the evaluation text has 28 documents)" in intervals_note(several, rows)
    assert words not in intervals_note(several, rows) + intervals_note(uncalibrated, rows)


def test_averages_are_compared_by_it_too(study_dir, study):
    rows = table_of(study_dir, study)
    for measure, is_shown in (("absolute_error", True), ("kl_divergence", False)):
        changed = showing(study, measure)
        head = present(average_table(changed, rows)).head
        increase = "loss increase, 10^-3 nats/token"
        assert head.count(increase) == is_shown * len(study.quantization.specs)
        last = increase if is_shown else "KL divergence, 10^-3 nats/token"
        assert head[3:6] == ["quantized loss, nats per token", "relative error, %", last]
        shown = drawn(averages, Canvas(changed, rows, study_dir)).rows
        assert any(INCREASE_AXIS.label in row for row in shown) is is_shown


def test_nothing_else_changes_for_the_default(study):
    assert study.quantization.measure == "kl_divergence"
    assert kl_divergence.headline(study)


def test_losses_are_beside_accuracy_at_the_tokens_of_every_checkpoint(study_dir, study):
    """Two panels per spec; accuracy lost is that of the result files, of its mean over tasks."""
    specs = study.quantization.specs
    tasks = TasksSettings(specs=specs, tasks="piqa,sciq", along=True)
    changed = showing(study, "relative_error").model_copy(update={"tasks": tasks})
    lost = dict[tuple[str, int, str], float]()
    for run in changed.trained:
        for step, spec in product(run.save_steps, specs):
            model = MeasuredModel(step)
            value = (step + 7 * len(lost)) / 5000
            lost[run.name, step, spec] = value
            path = study_dir / result(run.name, model, "tasks", spec)
            path.parent.mkdir(parents=True)
            intervals = {"degradation": [value - 0.01, value + 0.02]}
            mean = {"degradation": value, "intervals": intervals}
            directory = {"path": str(hf_directory(run.name, model))}
            content = {"model": directory, "spec": {"name": spec}, "measured": {"mean": mean}}
            reseal(path, content)
    rows = table_of(study_dir, changed)
    canvas = Canvas(changed, rows, study_dir)
    assert accuracy_degradation.applies(changed)
    assert not accuracy_degradation.applies(study)
    panels = chart_of(drawn(accuracy_degradation, canvas))["concat"]
    assert len(panels) == 2 * len(specs)
    names = {look.label: run for run, look in canvas.runs.looks.items()}
    shown = drawn(accuracy_degradation, canvas).rows
    titles = {spec_title(spec): spec for spec in specs}
    accuracies = [row for row in shown if LOST.label in row]
    found = {
        (names[row["run"]], row["step"], titles[row["panel"]]): row[LOST.label]
        for row in accuracies
    }
    assert found == {place: 100 * value for place, value in lost.items()}
    for row in accuracies:
        value, tokens = row[LOST.label], row["step"] * changed.trained[0].tokens_per_step
        assert row[f"{LOST.label}, low"] == pytest.approx(value - 1)
        assert row[f"{LOST.label}, high"] == pytest.approx(value + 2)
        assert row[canvas.tokens.label] * canvas.unit == tokens
    errors = [row for row in shown if "relative error of the loss, %" in row]
    assert len(errors) == len(accuracies)
