"""The probe's rows of metrics.jsonl in the figure and in MLflow."""

import pytest

from dynamics.figures.probe import INCREASE, OUTPUT, probe
from study.figures.canvas import Canvas
from study.figures.drawing import pictures_of
from study.results.table import Row
from study.tracking.streams import metrics_stream
from tests.sealing import json_lines
from tests.study.synthetic import table_of
from tests.study.varied import weight_decay, write_varied
from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run.probe import ProbeConfig

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
    directory = write_varied(tmp_path_factory.mktemp("probed") / changed.name, changed)
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
    drawing = probe.draw(Canvas(study, table, directory))
    assert drawing is not None
    during = [row for row in drawing.rows if row["series"] == "while training"]
    assert {(row["run"], row["panel"], row["step"]): row[INCREASE.label] for row in during} == {
        (run, f"RTN, {bits} bits, groups of 32", step): step / 10**bits
        for run, widths in (("0", (3, 4)), ("0.1", (3,)))
        for bits in widths
        for step in STEPS
    }
    saved = [row for row in drawing.rows if row["series"] == "checkpoint"]
    assert {row["panel"] for row in saved} == {"RTN, 3 bits, groups of 32"}
    assert len(saved) == len([row for row in table if row["average"] is None])
    assert all(row[INCREASE.label] == 0.01 * row["step"] for row in saved)
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
        for own in stream.metrics
        for metric in own
        if metric.key.startswith("train/quantization/")
    }
    assert sent == {
        (f"train/{key}", step * 2048): value
        for step in STEPS
        for key, value in figures((3, 4), step).items()
    }
