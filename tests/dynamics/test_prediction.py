"""The end of training drawn: the prediction against the measured increase, the cost by block, and the probe."""

import json

import pytest

from base.errors import UserError
from ckpt_tools.hf.measured import MeasuredStep, Quantization
from ckpt_tools.hf.results import read_result
from dynamics.figures.prediction import (
    ALONE,
    MEASURED,
    NEEDED,
    PREDICTED,
    REMAINDER,
    TITLES,
    blocks,
    blocks_of,
    output_errors,
    percent,
    prediction,
    relative_text,
    shares,
)
from dynamics.figures.probe import INCREASE, OUTPUT, probe
from dynamics.figures.slices import slices
from study.figures.canvas import Canvas
from study.figures.figure import pictures_of
from study.figures.looks import Runs, looks_for
from study.paths import blocks_result, slice_result, step_result
from study.results.table import Row
from study.tracking.streams import metrics_stream
from tests.dynamics.drawing import chart_of, drawn
from tests.present import present
from tests.quant_eval.models import run_settings
from tests.sealing import edited, json_lines, measured_in, reseal
from tests.study.curved import BLOCKS, step_content
from tests.study.synthetic import table_of, write_blocks, write_study
from tests.study.varied import weight_decay
from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run.probe import ProbeConfig

SPEC = "gptq-b3-g32"
TITLE = "GPTQ, 3 bits, groups of 32"


@pytest.mark.parametrize("sign", [1, -1])
def test_the_figure_holds_every_part_of_every_step(study_dir, study, sign):
    """If an increase is negative, or an interval reaches 0, the axes are not logarithmic."""
    for run in study.runs:
        for spec in study.quantization.by_block:
            content = step_content(sign * 1e-3 * run.optimizer.peak_lr)
            reseal(study_dir / step_result(run, spec), content)
    panels = chart_of(drawn(prediction, Canvas(study, [], study_dir)))["concat"]
    for panel in panels[:3]:
        marks = panel["layer"][-1]
        shown = sorted(
            (row[MEASURED.label], row[PREDICTED.label]) for row in marks["data"]["values"]
        )
        measured = [
            sign * run.optimizer.peak_lr / part
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
            sign * 0.04 * run.optimizer.peak_lr / part
            for run in study.runs
            for part in (*[BLOCKS] * BLOCKS, 1)
        ]
        assert remainders == [pytest.approx(value) for value in expected]
        text = json.dumps(percent(-0.04, 0.01))
        assert marks["encoding"]["x"]["axis"]["labelExpr"].count(text) == len(study.runs)


@pytest.mark.parametrize(
    ("figure", "result"),
    [(prediction, step_result), (blocks, blocks_result), (slices, slice_result)],
    ids=["prediction", "blocks", "slices"],
)
def test_results_that_are_missing_leave_their_place_empty_and_broken_ones_are_named(
    study_dir, study, figure, result
):
    canvas = Canvas(study, [], study_dir)
    first, *others = (study_dir / result(run, SPEC) for run in study.runs)
    for path in others:
        path.unlink()
    drawing = drawn(figure, canvas)
    labels = {row["run"] for row in drawing.rows if row.get("panel", TITLE).startswith(TITLE)}
    assert labels == {f"{study.runs[0].optimizer.peak_lr:g}"}
    for content in ("{", "[1]", '{"measured": []}'):
        first.write_text(content)
        with pytest.raises(UserError, match=r"result\.json"):
            figure.draw(canvas)


def test_an_increase_that_may_be_none_has_no_relative_difference():
    whole = present(MeasuredStep.model_validate(step_content(0.01)["measured"]).whole)
    assert relative_text(whole) == percent(-0.04, 0.01)
    unsure = present(whole.measured).model_copy(update={"interval": (-0.001, 0.02)})
    assert relative_text(whole.model_copy(update={"measured": unsure})) == "\N{EM DASH}"


RESULT = "hf/step00000640/blocks/gptq-b3-g32/result.json"


def result_with(increase: tuple[float, float, float], alone: list, others: list) -> Quantization:
    """increase, and per block alone and without it: (value, low, high)."""

    def cost(value: float, low: float, high: float) -> dict:
        intervals = {"absolute_error": (low, high), "kl_divergence": (0, 1)}
        return {"absolute_error": value, "intervals": intervals}

    listed = [
        {"block": block, "alone": cost(*alone), "all_but_it": cost(*rest)}
        for block, (alone, rest) in enumerate(zip(alone, others, strict=True))
    ]
    errors = {"1.attention.dense": 0.3, "0.mlp.up": None, "0.mlp.down": 0.1}
    layers = [
        {"name": f"gpt_neox.layers.{name}", "relative_output_error": error}
        for name, error in errors.items()
    ]
    return Quantization.model_validate(cost(*increase) | {"blocks": listed, "layers": layers})


def test_shares_are_of_the_whole_models_increase():
    alone = [(0.1, 0.08, 0.13), (0.05, -0.01, 0.11)]
    others = [(0.06, 0.05, 0.08), (0.12, 0.1, 0.15)]
    parts = shares(result_with((0.2, 0.15, 0.25), alone, others))
    assert parts[ALONE] == {
        0: pytest.approx((0.5, 0.4, 0.65)),
        1: pytest.approx((0.25, -0.05, 0.55)),
    }
    # without block 0 there is 0.06 of 0.2 left: it makes 70 percent
    assert parts[NEEDED] == {0: pytest.approx((0.7, 0.6, 0.75)), 1: pytest.approx((0.4, 0.25, 0.5))}


@pytest.mark.parametrize("low", [0.0, -0.1])
def test_an_increase_that_may_be_none_is_not_shared_out(low):
    assert shares(result_with((0.2, low, 0.5), [(0.1, 0, 0.2)], [(0.1, 0, 0.2)])) == {}


def test_linears_belong_to_the_block_of_their_name_and_folded_ones_to_none():
    increases = [(0.1, 0.0, 0.2)] * 2
    result = result_with((0.2, 0.1, 0.3), increases, increases)
    assert output_errors(result) == {0: [0.1], 1: [0.3]}


@pytest.mark.parametrize("count", [4, 32])
def test_the_figure_holds_every_share_of_every_run(study_dir, study, count):
    """With many blocks intervals are bands."""
    for run in study.runs:
        path = study_dir / run.name / RESULT
        write_blocks(path, json.loads(path.read_text()), blocks=count)
    drawing = drawn(blocks, Canvas(study, [], study_dir))
    cost = [2 if block in (0, count - 1) else 1 for block in range(count)]  # as the synthetic ones
    expected = [
        [90 * part / sum(cost) for part in cost],  # percent
        [120 * part / sum(cost) for part in cost],
    ]
    expected.append([0.03 * (1 + 0.1 * block) for block in range(count)])
    for panel, quantity, values in zip(chart_of(drawing)["concat"], TITLES, expected, strict=True):
        assert panel["title"] == ["GPTQ, 3 bits, groups of 32", TITLES[quantity]]
        marks = panel["layer"][-1]
        kinds = {layer["mark"]["type"] for layer in marks["layer"]}
        assert kinds == {"line", "point", "area" if count > 12 else "rule"}
        by_run: dict[str, list] = {}
        for row in marks["data"]["values"]:
            by_run.setdefault(row["run"], []).append((row["decoder block"], row[quantity.label]))
        assert len(by_run) == len(study.runs)
        for shown in by_run.values():
            assert [block for block, _ in shown] == list(range(count))
            assert [value for _, value in shown] == pytest.approx(values)


def test_a_result_without_a_clear_increase_has_no_shares(study_dir, study):
    for run in study.runs:
        with edited(study_dir / run.name / RESULT) as content:
            content["measured"]["intervals"]["absolute_error"][0] = -0.001
    drawing = drawn(blocks, Canvas(study, [], study_dir))
    texts = [
        panel["layer"][-1].get("mark", {}).get("text") for panel in chart_of(drawing)["concat"]
    ]
    assert texts == ["no clear increase", "no clear increase", None]
    assert {row["panel"] for row in drawing.rows} == {
        "GPTQ, 3 bits, groups of 32, linears of the block"
    }


def test_results_without_blocks_have_no_figure(study_dir, study):
    for run in study.runs:
        with edited(study_dir / run.name / RESULT) as content:
            content["measured"]["blocks"] = []
    assert blocks.draw(Canvas(study, [], study_dir)) is None


def test_a_real_result_is_drawn_and_equals_the_one_without_blocks(
    hf_dir, train_prefix, held_out_prefix, tmp_path
):
    """quant_eval's own result: of the spec itself --per-block changes nothing."""
    from base.ranks import start
    from quant_eval.measuring.measurement import measure
    from quant_eval.specs import parse_spec

    text = {"calibration_sequences": 16, "sequence_length": 32, "eval_tokens": 5000}
    settings = run_settings(train_prefix, held_out_prefix, **text)
    (plain,), (by_block,) = (
        measure(
            hf_dir,
            (parse_spec("gptq-b2-g16"),),
            (tmp_path,),
            settings.model_copy(update={"per_block": per_block}),
            start("cpu"),
        )
        for per_block in (False, True)
    )
    reseal(tmp_path / "result.json", by_block)
    measured = measured_in(tmp_path)
    for result in (measured, plain["measured"]):
        result.pop("blocks", None), result.pop("units")
    assert measured == plain["measured"]
    read = read_result(tmp_path, Quantization).measured
    (look,) = looks_for(["one"])
    drawing = blocks_of(Runs("model", {"one": look}), [(look, read)], "GPTQ")
    assert [row["decoder block"] for row in drawing.rows] == [0, 1], (
        "2 bits of nothing have no share"
    )


LINEARS = ("layers.2.self_attn.o_proj", "layers.2.mlp.down_proj")
STEPS = (160, 320, 480)


@pytest.fixture(scope="module")
def probed(tmp_path_factory, study):
    """Two of four runs are probed, one at another width; of 3 bits checkpoints are measured too."""
    changed = weight_decay(study)
    widths = {"wd0": (3, 4), "wd0.1": (3,)}
    runs = []
    for run in changed.runs:
        assert isinstance(run, RunConfig)
        bits = widths.get(run.name)
        settings = ProbeConfig(every_steps=160, group_size=32, bits=bits) if bits else None
        runs.append(run.model_copy(update={"probe": settings}))
    changed = changed.model_copy(update={"runs": tuple(runs)})
    directory = write_study(tmp_path_factory.mktemp("probed") / changed.name, changed)
    for name, bits in widths.items():
        with RunDirectory(directory / name).metrics.open("a") as file:
            for step in STEPS:
                row = {"step": step, "tokens": step * 2048, "attempt": 1, "time": 1.7e9 + step}
                file.write(json_lines([row | figures(bits, step)]))
    rows = [
        Row.of({**row, "quant/rtn-b3-g32/absolute_error": 0.01 * row["step"]})
        for row in table_of(directory, changed)
    ]
    return changed, rows, directory


def figures(widths: tuple[int, ...], step: int) -> dict[str, float]:
    values = {"quantization/held_out_loss": 5.0}
    for bits in widths:
        values[f"quantization/rtn-b{bits}-g32/absolute_error"] = step / 10**bits
        for factor, linear in enumerate(LINEARS, 1):
            for method in ("rtn", "gptq"):
                key = f"quantization/{method}-b{bits}-g32/output_error/{linear}"
                values[key] = factor * len(method) * step / 10**bits
    return values


def test_the_figure_holds_every_row_at_its_place(probed):
    study, table, directory = probed
    drawing = drawn(probe, Canvas(study, table, directory))
    during = [row for row in drawing.rows if row["series"] == "while training"]
    assert {(row["run"], row["panel"], row["step"]): row[INCREASE.label] for row in during} == {
        (run, f"RTN, {bits} bits, groups of 32", step): 1000 * (step / 10**bits)
        for run, widths in (("0", (3, 4)), ("0.1", (3,)))
        for bits in widths
        for step in STEPS
    }
    saved = [row for row in drawing.rows if row["series"] == "checkpoint"]
    assert {row["panel"] for row in saved} == {"RTN, 3 bits, groups of 32"}
    assert len(saved) == len([row for row in table if row["average"] is None])
    assert all(row[INCREASE.label] == 1000 * (0.01 * row["step"]) for row in saved)
    outputs = {
        (row["panel"], row["series"], row["run"], row["step"]): row[OUTPUT.label]
        for row in drawing.rows
        if OUTPUT.label in row
    }
    assert outputs["layers.2.mlp.down_proj, 3 bits", "GPTQ", "0.1", 320] == 2 * 4 * 0.32
    assert len(outputs) == 3 * 2 * 2 * len(STEPS)  # widths of runs, linears, methods
    assert pictures_of(drawing.chart)["png"]


def test_a_study_without_a_probe_has_no_such_figure(study):
    assert not probe.applies(study)


def test_mlflow_has_every_row(probed):
    _, _, directory = probed
    stream = metrics_stream(RunDirectory(directory / "wd0").metrics)
    sent = {
        (metric.key, metric.step): metric.value
        for of_row in stream.metrics
        for metric in of_row
        if metric.key.startswith("train/quantization/")
    }
    assert sent == {
        (f"train/{key}", step * 2048): value
        for step in STEPS
        for key, value in figures((3, 4), step).items()
    }
