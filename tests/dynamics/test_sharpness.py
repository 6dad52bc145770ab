"""Critical sharpness in a study: the checkpoints before, the columns, the figure, correlations."""

import numpy as np
import pytest
from scipy import stats

from curvature.settings import LineSettings
from dynamics.figures.sharpness import critical_of, sharpness, sharpness_line
from dynamics.mechanism.correlation import association
from study.claims.verdict import Evidence
from study.figures.canvas import Canvas
from study.measurements.critical import OF_MOVE, OF_STEP
from study.paths import MeasuredModel
from study.released import ReleasedRevision, ReleasedRun
from study.results.paired import Paired
from study.results.table import Row
from study.steps import steps_of
from tests.dynamics.drawing import chart_of, drawn
from tests.present import present
from tests.study.synthetic import row_at, table_of, write_study
from tests.study.varied import budgets


@pytest.fixture(scope="module")
def measured(tmp_path_factory, study):
    """Runs with branches, whose moves are measured."""
    changed = budgets(study).model_copy(update={"critical": LineSettings(sequences=4)})
    directory = write_study(tmp_path_factory.mktemp("sharpness") / changed.name, changed)
    return changed, table_of(directory, changed), directory


def test_the_checkpoint_before_a_branch_is_its_parents(measured):
    study, table, _ = measured
    branches = [run for run in study.trained if run.branch_from]
    assert branches
    steps = {step.name: step for step in steps_of(study)}
    for run in branches:
        first = MeasuredModel(run.save_steps[0])
        parent = study.parent_of(run)
        assert study.before(run, first) == (parent, MeasuredModel(run.branch_from.step))
        step = steps[f"critical-{run.name}-step{first.step:08}"]
        assert step.models[-1].endswith(f"{parent.name}/hf/step{run.branch_from.step:08}")
        assert f"export-{parent.name}-step{run.branch_from.step:08}" in step.after
        assert row_at(table, run.name, first.step)[OF_MOVE.curvature.name] is not None
    for run in study.trained:
        if not run.branch_from:
            assert study.before(run, MeasuredModel(run.save_steps[0])) is None
            assert row_at(table, run.name, run.save_steps[0])[OF_MOVE.curvature.name] is None


def test_a_stage_moves_from_the_last_weights_of_the_one_before(study):
    first, second, soup = (
        ReleasedRun(
            name=name,
            model="model",
            source="owner/model",
            parent=parent,
            average_of=average_of,
            revisions=tuple(ReleasedRevision(name=f"{name}-{step}", step=step) for step in (1, 2)),
        )
        for name, parent, average_of in (
            ("stage1", None, ()),
            ("stage2", "stage1", ()),
            ("soup", None, ("stage2",)),
        )
    )
    released = study.model_copy(
        update={"runs": (first, second, soup), "critical": LineSettings(), "soups": ()}
    )
    models = {run.name: released.models_of(run) for run in released.runs}
    assert released.before(second, models["stage2"][0]) == (first, models["stage1"][1])
    assert released.before(second, models["stage2"][1]) == (second, models["stage2"][0])
    assert released.before(first, models["stage1"][0]) is None
    assert [released.before(soup, model) for model in models["soup"]] == [None, None]


def test_the_figure_shows_values_and_bounds(measured):
    study, table, directory = measured
    drawing = drawn(sharpness, Canvas(study, table, directory))
    chart = chart_of(drawing)
    titles = [" ".join(panel["title"]) for panel in chart["concat"]]
    assert titles[0] == "Curvature along the move"
    assert any(title.startswith("curvature along the move rank over all +1.00") for title in titles)
    critical = [row for row in drawing.rows if row["panel"] == "Critical sharpness along the move"]
    # -0.5 times the move everywhere but at the ends, where none was found up to 64
    shown = {(row["critical sharpness, 1 / move"], row["critical multiple"]) for row in critical}
    assert shown == {(4.0, "-0.5"), (2 / 64, "none up to 64")}
    assert {row["bound"] for row in critical if row["critical multiple"] == "-0.5"} == {"False"}
    # The axis is that of the values; bars, which reach above 4.8, leave it.
    label = "critical sharpness, 1 / move"
    assert max(row.get(f"{label}, high", 0) for row in critical) > 4.0
    domains = [
        layer["encoding"]["y"]["scale"]["domain"]
        for part in chart["concat"][1]["layer"]
        for layer in part.get("layer", [])
        if layer.get("encoding", {}).get("y", {}).get("field") == label
    ]
    assert domains
    assert all(domain == pytest.approx([1 / 64, 4.8]) for domain in domains)


def test_steps_by_forward_passes_are_beside_exact_products(tmp_path, study):
    changed = study.model_copy(update={"critical": LineSettings(sequences=4)})
    directory = write_study(tmp_path / changed.name, changed)
    table = table_of(directory, changed)
    drawing = drawn(sharpness, Canvas(changed, table, directory))
    rows = [row for row in drawing.rows if row["panel"] == "Curvature along quantization steps"]
    specs, unit = study.quantization.by_block, "nats/token / (unit of the parameters)^2"
    assert len(rows) == len(specs) * len(study.runs)
    shown = [
        (row[f"curvature by forward passes, {unit}"], row[f"curvature by Hessian products, {unit}"])
        for row in rows
    ]
    # The step is 2 long: d'Hd / |d|^2 is half of the second order, which is d'Hd / 2.
    expected = [
        (row[OF_STEP.curvature.of(spec)], row[f"curvature/step-{spec}/second_order"] / 2)
        for row in table
        for spec in specs
        if row[OF_STEP.curvature.of(spec)] is not None
    ]
    assert sorted(shown) == [pytest.approx(pair, rel=1e-12) for pair in sorted(expected)]


def test_words_of_a_bound(measured):
    _, table, _ = measured
    row = next(row for row in table if row[OF_MOVE.sharpness.name])
    rises = dict(row) | {
        OF_MOVE.sharpness.name: None,
        OF_MOVE.not_above.name: 0.0,
        OF_MOVE.above.name: 0.25,
    }
    assert critical_of(Row.of(rises)) == (8.0, "below 0.25")
    assert critical_of(Row.of(rises | {OF_MOVE.not_above.name: 0.125})) == (
        8.0,
        "between 0.125 and 0.25",
    )


def test_the_side_is_known_without_a_multiple(measured):
    """The loss falls ahead at the ends, where the search found nothing up to 64."""
    study, table, directory = measured
    slope, multiple = OF_MOVE.slope.name, OF_MOVE.multiple.name
    moved = [row for row in table if row[slope] is not None]
    ahead = [row for row in moved if row[multiple] is None]
    assert 0 < len(ahead) < len(moved)
    rows = [
        Row.of(dict(row) | {slope: -0.1 if row in ahead else 0.1}) if row in moved else row
        for row in table
    ]
    line = sharpness_line(Evidence(study, rows, Paired(directory)))
    assert f"At {len(ahead)} of {len(moved)} checkpoints the loss first falls further" in line


def test_no_figure_without_the_measurement(study):
    assert not sharpness.applies(study)


def test_correlations_are_those_of_scipy_with_a_jackknife():
    draw = np.random.default_rng(0)
    trainings = [f"run{number // 4}" for number in range(24)]
    shift_N = np.repeat(draw.normal(size=6), 4)
    first_N = shift_N + draw.normal(size=24)
    second_N = shift_N + 0.5 * first_N + draw.normal(size=24)
    names = np.array(trainings)

    def within(values_N, kept_N):
        return np.concatenate(
            [
                values_N[kept_N & (names == name)] - values_N[kept_N & (names == name)].mean()
                for name in dict.fromkeys(names[kept_N])
            ]
        )

    def value(kept_N, ranked, is_within):
        if is_within:
            return stats.pearsonr(within(first_N, kept_N), within(second_N, kept_N)).statistic
        method = stats.spearmanr if ranked else stats.pearsonr
        return method(first_N[kept_N], second_N[kept_N]).statistic

    everything_N = np.full(24, True)
    for ranked, is_within in ((False, False), (True, False), (False, True)):
        found = present(association(first_N, second_N, trainings, ranked=ranked, within=is_within))
        interval = present(found.interval)
        assert found.value == pytest.approx(value(everything_N, ranked, is_within), rel=1e-12)
        z = [
            np.arctanh(value(names != name, ranked, is_within)) for name in dict.fromkeys(trainings)
        ]
        error = np.sqrt(5 / 6 * np.sum((np.array(z) - np.mean(z)) ** 2))
        half = stats.t.ppf(0.975, 5) * error
        ends = np.tanh(np.arctanh(found.value) - half), np.tanh(np.arctanh(found.value) + half)
        assert (interval.low, interval.high) == pytest.approx(ends, rel=1e-9)


def test_ranks_within_trainings_are_those_of_each():
    first_N, second_N = np.array([1.0, 5, 2, 100, 300, 200]), np.array([4.0, 6, 5, 1, 3, 2])
    found = present(association(first_N, second_N, list("aaabbb"), ranked=True, within=True))
    assert found.value == pytest.approx(1.0, abs=1e-8)
    assert found.interval is None  # of two trainings
    assert str(found) == "+1.00"


def test_one_degree_of_freedom_is_no_correlation():
    """Two checkpoints of a training, and one of another: within them two points are on a line."""
    first_N, second_N = np.array([1.0, 2, 7]), np.array([3.0, 5, 4])
    assert association(first_N, second_N, list("aab"), ranked=False, within=True) is None
    none_N = np.zeros(0)  # as before the first result
    assert association(none_N, none_N, [], ranked=True, within=False) is None
    of_one = present(association(first_N, second_N, list("aaa"), ranked=False, within=False))
    assert of_one.interval is None, "nothing is left without the one training"
    over_all = present(association(first_N, second_N, list("aab"), ranked=False, within=False))
    assert over_all.value == pytest.approx(stats.pearsonr(first_N, second_N).statistic, rel=1e-12)
