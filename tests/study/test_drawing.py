"""From data to pictures: every value at its place, branches go on from their parents, ends lie at what varies."""

import math
from dataclasses import replace

import pytest
from matplotlib.axes import Axes

from study.canvas import Canvas, looks_of
from study.drawing import drawn
from study.ends import ends_plot
from study.figures import draw_all
from study.plots import Axis, Mark, Panel, Plot, Point, Series, wrapped
from study.released import ReleasedRevision, ReleasedRun
from study.trajectories import curvature_plot, quantization_plot, quantized_loss_plot
from tests.study.synthetic import table_of
from tests.study.varied import budgets, weight_decay, write_varied

FIGURES = ["relative_error", "kl_divergence"]


@pytest.fixture(scope="module")
def branched(tmp_path_factory, study):
    changed = budgets(study)
    directory = write_varied(tmp_path_factory.mktemp("drawing") / changed.name, changed)
    return changed, told_apart(table_of(directory, changed)), directory


def told_apart(rows: list[dict]) -> list[dict]:
    """The same rows with other values in every run, as runs of one peak learning rate have one synthetic error."""
    runs = list(dict.fromkeys(row["run"] for row in rows))
    return [
        {
            key: value * (1 + 0.1 * runs.index(row["run"])) if key.startswith("quant/") and value else value
            for key, value in row.items()
        }
        for row in rows
    ]


def lines_of(axis: Axes) -> list[tuple[str, list[tuple[float, float]], list[float]]]:
    """Colour, points and bars of every line with bars."""
    found = []
    for container in axis.containers:
        line, _, bars = container
        points = list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        spans = [end[1] for one in bars for segment in one.get_segments() for end in segment]
        found.append((line.get_color(), points, spans))
    return found


@pytest.mark.parametrize(
    "make", [quantized_loss_plot, curvature_plot, lambda canvas: quantization_plot(canvas, FIGURES[0])]
)
def test_a_picture_holds_every_point_with_its_bar_in_the_colour_of_its_run(branched, make):
    study, rows, _ = branched
    plot = make(Canvas(study, rows))
    axes = drawn(plot).axes
    for place, panel in plot.shown:
        found = lines_of(axes[place])
        for series in panel.series:
            points = [(point.x, point.y) for point in series.points]
            spans = [end for point in series.points for end in point.y_interval or ()]
            assert any(
                colour == series.mark.colour and drawn_points == points and bars == pytest.approx(spans)
                for colour, drawn_points, bars in found
            ), series


def test_a_branch_goes_on_from_its_parents_checkpoint(branched):
    study, rows, _ = branched
    canvas = Canvas(study, rows)
    column = "quant/gptq-b3-g32/kl_divergence"
    links = [series for series in canvas.lines(column, None) if not series.is_data]
    assert sorted(series.run or "" for series in links) == ["WSD 400", "WSD 600", "WSD 800"]
    of = {(row["run"], row["step"]): row for row in rows}
    for series, start in zip(links, (320, 480, 640), strict=True):
        parent, own = of["stable", start], of[f"wsd{start * 5 // 4}", start + start // 8]
        assert [point.x * 1e6 for point in series.points] == pytest.approx([parent["tokens"], own["tokens"]])
        assert [point.y for point in series.points] == [parent[column], own[column]]
        assert series.mark.marker == ""


def test_learning_rates_of_branches_begin_where_they_do(branched):
    study, rows, _ = branched
    canvas = Canvas(study, rows)
    per_step = study.trained[0].tokens_per_step
    rates = {series.run: series.points for series in canvas.rates}
    assert rates.keys() == {look.label for look in canvas.looks.values()}
    for start in (320, 480, 640):
        first, *_, last = rates[f"WSD {start * 5 // 4}"]
        assert [first.x * 1e6, last.x * 1e6] == pytest.approx([start * per_step, start * 5 // 4 * per_step])
        assert (first.y, last.y) == (1.0, 0.0)


def test_schedules_that_coincide_are_one_line_of_no_run(collected_dir, study):
    (rate,) = Canvas(study, []).rates
    assert rate.run is None
    assert max(point.y for point in rate.points) == 1.0


@pytest.mark.parametrize("make", [budgets, weight_decay])
def test_the_ends_lie_at_what_is_varied_with_a_line_per_group(tmp_path, study, make):
    changed = make(study)
    rows = told_apart(table_of(write_varied(tmp_path / changed.name, changed), changed))
    assert changed.varied is not None
    plot = ends_plot(Canvas(changed, rows), changed.varied)
    last = {row["run"]: row for row in rows if row["average"] is None}  # rows rise by step
    groups = set(changed.varied.groups.values())
    columns = [f"quant/gptq-b{bits}-g32/{figure}" for figure in FIGURES for bits in (3, 4)]
    assert len(plot.shown) == len(columns)
    for (_, panel), column in zip(plot.shown, columns, strict=True):
        found = {
            point.facts["run"]: (point.x, point.y, point.y_interval)
            for series in panel.series
            if series.is_data
            for point in series.points
        }
        assert found == {
            run: (value, last[run][column], (last[run][f"{column}_low"], last[run][f"{column}_high"]))
            for run, value in changed.varied.values.items()
        }
        lines = [[point.x for point in series.points] for series in panel.series if not series.is_data]
        assert len(lines) == max(len(groups), 1)
        assert all(line == sorted(line) for line in lines)
        assert panel.x.is_log == (make is budgets)
    assert set(plot.keys) == groups


def test_what_cannot_lie_on_a_logarithmic_axis_is_refused(study):
    changed = weight_decay(study)
    assert changed.varied is not None
    with pytest.raises(ValueError, match="weight decay has values that are not positive"):
        ends_plot(Canvas(changed, []), changed.varied.model_copy(update={"scale": "log"}))


def test_one_value_has_one_colour_and_one_group_one_marker(branched):
    study, _, _ = branched
    looks = looks_of(study)
    for end in (400, 600, 800):
        assert looks[f"wsd{end}"].colour == looks[f"cosine{end}"].colour
    assert len({looks[f"wsd{end}"].marker for end in (400, 600, 800)}) == 1
    assert looks["wsd400"].marker != looks["cosine400"].marker
    assert len({(look.colour, look.marker) for look in looks.values()}) == len(looks)


def test_a_released_model_has_the_learning_rates_that_are_known(branched, study):
    """Of three checkpoints one has no known tokens, and one no known learning rate."""
    _, rows, _ = branched
    known = [(10, 1e9, 2e-4), (20, None, 3e-4), (30, 3e9, None)]
    revisions = tuple(ReleasedRevision(name=f"r{step}", step=step) for step, _, _ in known)
    run = ReleasedRun(name="stage1", source="somebody/model", revisions=revisions)
    released = study.model_copy(update={"runs": (run,), "soups": (), "labels": {}})
    own = [
        row | {"run": "stage1", "phase": "stage1", "step": step, "tokens": tokens, "learning_rate": rate}
        for row, (step, tokens, rate) in zip(rows, known, strict=False)
    ]
    canvas = Canvas(released, own)
    assert canvas.unit_name == "billion"
    ((rate,), (line,)) = canvas.rates, canvas.lines("quant/gptq-b3-g32/kl_divergence", None)
    assert [(point.x, point.y) for point in rate.points] == [(1.0, 1.0)]
    assert [point.x for point in line.points] == [1.0, 3.0]
    assert list(canvas.last_rows()) == ["stage1"]


def test_many_panels_are_wrapped_and_places_may_stay_empty():
    axis = Axis(title="x")
    mark = Mark(colour="#112233", marker="o")
    panels = [
        Panel(x=axis, y=axis, title=str(place), series=(Series(mark, (Point(x=place, y=place),)),))
        for place in range(6)
    ]
    placed, rows = wrapped(panels[:5])
    assert (len(placed), rows, placed[-1]) == (6, 2, None)
    assert [wrapped(panels[:count])[1] for count in (1, 3, 4, 6)] == [1, 1, 1, 2]
    axes = drawn(Plot(heading="h", looks={}, panels=placed, rows=rows)).axes
    assert [(one.get_visible(), one.get_title()) for one in axes] == [*((True, str(n)) for n in range(5)), (False, "")]


def test_bars_that_reach_zero_keep_an_axis_linear(branched):
    study, rows, _ = branched
    traces = [row | {"curvature/trace_low": -1.0} for row in rows]
    for changed, is_log in ((rows, True), (traces, False)):
        panel = curvature_plot(Canvas(study, changed)).shown[0][1]
        assert panel.y.is_log == is_log


def test_a_study_at_work_is_drawn_as_far_as_it_is(branched, tmp_path):
    """Before anything is measured there is nothing but the learning rates, which are no data."""
    study, rows, directory = branched
    nothing = [
        {key: row[key] if not key.startswith(("quant", "curv", "held")) else None for key in row} for row in rows
    ]
    figures = draw_all(directory, study, nothing)
    assert list(figures.plots) == ["validation_loss"], "whose data are those of training"
    assert set(figures.empty) == {"quantization_error", "kl_divergence", "ends", "full_against_quantized", "curvature"}
    half = [row if row["run"] == "stable" else blank for row, blank in zip(rows, nothing, strict=True)]
    assert quantization_plot(Canvas(study, half), "relative_error").has_data
    assert study.varied is not None
    assert not ends_plot(Canvas(study, half), study.varied).has_data, "the stable run has no value of its own"


def test_limits_hold_what_lies_late(study, branched):
    _, rows, _ = branched
    plot = quantized_loss_plot(Canvas(branched[0], rows))
    for _, panel in plot.shown:
        low, high = panel.y.limits
        assert low is not None
        assert high is not None
        ends = [series.points[-1] for series in panel.series if series.is_data]
        assert all(low < point.y < high and math.isfinite(point.x) for point in ends)
        assert replace(panel.y, limits=(None, None)).label == "quantized loss (nats per token)"
