"""The ends of arms that leave one run, at equal tokens: quantized loss and error against the loss.

An arm is a group of replicates, or an average of their weights. Its control is the run without the
anneal (`study.design`).
"""

import string
from collections.abc import Iterator
from itertools import chain, count
from typing import Any, NamedTuple

from base.grouping import grouped
from dynamics.figures.quantization import AXES
from study.definition import Study
from study.design import Group
from study.figures.canvas import Canvas
from study.figures.charts import (
    INK,
    LINE,
    NATS,
    Chart,
    Quantity,
    Rows,
    data,
    marks,
    panel,
)
from study.figures.figure import Drawn, drawn, figure
from study.figures.looks import Look, Runs
from study.measurements.kind import Column
from study.measurements.quantization import CROSS_ENTROPY, QUANTIZED_LOSS
from study.measurements.titles import spec_title
from study.results.averages import averagings_of
from study.results.paired import Paired
from study.results.summary import lineage
from study.results.table import Row
from train.run.config import RunConfig

FULL, QUANTIZED = Quantity("full-precision loss", NATS), Quantity("quantized loss", NATS)
ARM, KEY, AFTER_KEY = "arm", "key", "  "
COLUMNS = 2
# A star with four points: that with five is a soup in the legends of released models.
AVERAGE = "M0,-2L.5,-.5L2,0L.5,.5L0,2L-.5,.5L-2,0L-.5,-.5Z"
IS_AVERAGE = "datum.average !== ''"
# Places of the keys about their marks, in turn: ends of arms are close together.
PLACE = f"indexof('{string.ascii_letters}', datum.{KEY})"
BESIDE = {
    "dx": {"expr": f"{PLACE} % 2 ? -9 : 9"},
    "dy": {"expr": f"{PLACE} % 4 < 2 ? -7 : 9"},
}


class ArmEnds(NamedTuple):
    """The ends of an arm, and those of its control.

    Attributes:
        label: in the legend, after its key.
        group: of the runs.
        average: its name; None for weights as training left them.
        ends: last rows, with those of the controls, by rising seed.
    """

    label: str
    group: Group
    average: str | None
    ends: list[tuple[Row, Row]]


def has_arms(study: Study) -> bool:
    """Return whether anneals that differ in more than their seed share a control and an end."""
    arms = {
        (control.name, run.total_steps, study.group_of(run).label)
        for run in study.trained
        if (control := study.control_of(run))
    }
    return len({arm[:2] for arm in arms}) < len(arms)


@figure(
    "interventions",
    "Ends of training at equal tokens: against the loss in full precision the quantized loss, left,"
    " and the error of quantization, right; a row per spec. Lower is better on both axes. A mark is"
    " an arm, the mean over its seeds, with the letter of the legend; open stars are averages of"
    " weights. Lines follow the checkpoints of the run without an anneal, from where the anneals of"
    " the other lines leave it. Bars are 95% intervals of the paired difference from the run"
    " without an anneal, which has none: over held-out documents, and over calibration draws and"
    " seeds where there are several.",
    has_arms,
    headline=has_arms,
)
def interventions(canvas: Canvas) -> Drawn | None:
    """Draw two panels per spec, with a mark per arm."""
    study, paired = canvas.study, Paired(canvas.directory)
    error = study.quantization.measures[0]
    arms = list(_arms(canvas))
    looks = _looks(canvas, arms)
    panels = []
    for spec in study.quantization.specs:
        for measure, y in ((QUANTIZED_LOSS, QUANTIZED), (error, AXES[error])):
            rows = [
                row
                for arm, name in zip(arms, looks.looks, strict=True)
                if (row := _mark(arm, name, paired, spec, (measure, y)))
            ]
            lines = list(_lines(canvas, arms, looks, spec, (measure, y)))
            if rows:
                panels.append(([*rows, *lines], _panel(rows, lines, looks, y)))
    return drawn(panels, COLUMNS)


def _arms(canvas: Canvas) -> Iterator[ArmEnds]:
    """Yield the arms with results: of every group the weights, and then its averages."""
    study, averages = canvas.study, averagings_of(canvas.study)
    labels = {average.name: average.label(averages) for average in averages}
    rows = {(row["run"], row["step"], row["average"]): row for row in canvas.table}
    names = list(canvas.runs.looks)  # in the order of legends
    groups = sorted(study.groups, key=lambda group: names.index(group.runs[0].name))
    for group in groups:
        for average in (None, *labels):
            ends = []
            for run in group.runs:
                control = _control(study, run)
                end = rows.get((run.name, run.total_steps, average))
                before = rows.get((control.name, run.total_steps, None)) if control else None
                if end and before:
                    ends.append((end, before))
            if ends:
                label = f"{group.label}, {labels[average]}" if average else group.label
                yield ArmEnds(label, group, average, ends)


def _control(study: Study, run: Any) -> RunConfig | None:
    """Return the control of a run; a control is its own."""
    return run if run.name in study.controls else study.control_of(run)


def _looks(canvas: Canvas, arms: list[ArmEnds]) -> Runs:
    """Return the looks of arms: those of their runs, and stars for averages, each with a key."""
    looks = {}
    keys = chain(string.ascii_letters, map(str, count(1)))
    for key, arm in zip(keys, arms, strict=False):
        of_runs = canvas.runs.looks[arm.group.runs[0].name]
        name = f"{key}{AFTER_KEY}{arm.label}"
        shape = AVERAGE if arm.average else of_runs.shape
        looks[name] = Look(name, of_runs.colour, shape, name, name)
    return Runs(ARM, looks, field=ARM)


def _mark(
    arm: ArmEnds, name: str, paired: Paired, spec: str, shown: tuple[Column, Quantity]
) -> dict[str, Any]:
    """Return the row of an arm; empty where a figure is not measured."""
    measured: dict[str, Any] = {}
    for column, quantity in ((CROSS_ENTROPY, FULL), shown):
        values = [[row[column.of(spec)] for row in pair] for pair in arm.ends]
        if any(value is None for pair in values for value in pair):
            return {}
        controls = sum(control for _, control in values) / len(values)
        is_control = all(end is control for end, control in arm.ends)
        if is_control:
            measured |= quantity.values(controls)
            continue
        pairs = [[(end, 1.0), (control, -1.0)] for end, control in arm.ends]
        difference = paired.estimate(pairs, spec, column)
        low, high = difference.interval()
        measured |= quantity.values(controls + difference.value, (controls + low, controls + high))
    head = {
        "panel": spec_title(spec),
        ARM: name,
        KEY: name.partition(AFTER_KEY)[0],
        "average": arm.average or "",
    }
    end = arm.ends[0][0]
    return head | {"seeds": len(arm.ends), "step": end["step"], "tokens": end["tokens"]} | measured


def _lines(
    canvas: Canvas, arms: list[ArmEnds], looks: Runs, spec: str, shown: tuple[Column, Quantity]
) -> Iterator[dict[str, Any]]:
    """Yield the checkpoints of controls and of anneals that they or perturbed runs belong to.

    They are means over seeds, from where the first of these anneals starts.
    """
    study = canvas.study
    anneals = _followed(study)
    start = min((anneals[name] for name in anneals), default=0)
    for arm, name in zip(arms, looks.looks, strict=False):
        runs = [run for run in arm.group.runs if run.name in {*anneals, *study.controls}]
        if arm.average or not runs:
            continue
        columns = [(CROSS_ENTROPY.of(spec), FULL), (shown[0].of(spec), shown[1])]
        rows = [
            row
            for run in runs
            for row in lineage(study, canvas.table, run)
            if row["average"] is None
            and row["step"] >= anneals.get(run.name, start)
            and all(row[column] is not None for column, _ in columns)
        ]
        for step, of_seeds in grouped(rows, lambda row: row["step"]).items():
            means: dict[str, Any] = {}
            for column, quantity in columns:
                values = [row[column] for row in of_seeds]
                means |= quantity.values(sum(values) / len(values))
            yield {"panel": spec_title(spec), ARM: name, "step": step} | means


def _followed(study: Study) -> dict[str, int]:
    """Return the anneals that are drawn as lines, with their starts.

    Those that perturbed runs are compared with, or all where no run is perturbed.
    """
    partners = {other.name for run in study.trained if (other := study.unperturbed_of(run))}
    return {
        run.name: run.schedule.anneal.start_step
        for run in study.trained
        if run.schedule.anneal and (run.name in partners if partners else not run.perturbation)
    }


def _panel(rows: Rows, lines: Rows, looks: Runs, y: Quantity) -> Chart:
    x, y = (axis.near([*rows, *lines]) for axis in (FULL, y))
    axes = {"x": x.encoding(), "y": y.encoding()}
    path: Chart = {"color": looks.colour, "order": {"field": "step", "type": "quantitative"}}
    name = {"type": "text", "fontSize": 11, "color": INK, "tooltip": None} | BESIDE
    text: Chart = {"text": {"field": KEY, "type": "nominal"}}
    layers = [
        data(lines, mark=LINE, encoding=axes | path),
        marks(rows, looks, x, y, has_line=False, open_where=IS_AVERAGE),
        data(rows, mark=name, encoding=axes | text),
    ]
    return panel(layers, rows[0]["panel"], COLUMNS)
