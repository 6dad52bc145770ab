"""Error at the end of the anneal against runs of equal tokens without it."""

from dynamics.figures.quantization import DIVERGENCE
from quant_eval.estimate import Estimate
from study.figures.canvas import Canvas
from study.figures.charts import NATS, Chart, Quantity, Rows, data, level, panel, tooltip
from study.figures.figure import Drawn, drawn, figure
from study.figures.looks import Runs
from study.measurements.titles import spec_title
from study.results.averages import lowest_spec
from study.results.paired import Paired, Weighted
from study.results.summary import RunSummary, summarize

FIGURE = "kl_divergence"  # the first that the claims are judged by: the least noise
DIFFERENCE = Quantity("annealed - not annealed", NATS, holds_zero=True)
SERIES = ("annealed", "not annealed")
SHAPES = ("circle", "square")
PANEL_HEIGHT = 170


@figure(
    "anneal_against_control",
    1,
    "Annealed against not annealed at equal tokens: KL divergence of the quantized from the"
    " full-precision model at the fewest bits, and the paired difference. Points are means over"
    " seeds. Bars are 95% intervals over held-out documents, and over calibration draws and seeds"
    " where there are several; those of the difference decide.",
    lambda study: bool(study.controls),
)
def anneal_against_control(canvas: Canvas) -> Drawn | None:
    """Draw the error with and without the anneal of every group of runs, and the difference."""
    spec = lowest_spec(canvas.study)
    column = f"quant/{spec}/{FIGURE}"
    groups: dict[str, list[RunSummary]] = {}
    for end in summarize(canvas.study, canvas.table):
        if end.control and end.last and None not in (end.control[column], end.last[column]):
            groups.setdefault(end.group, []).append(end)

    paired, errors, differences = Paired(canvas.directory), Rows(), Rows()
    for group, ends in groups.items():
        head = {"panel": spec_title(spec), canvas.runs.heading: group, "seeds": len(ends)}
        annealed: list[Weighted] = [[(end.last, 1.0)] for end in ends if end.last]
        control: list[Weighted] = [[(end.control, 1.0)] for end in ends if end.control]
        change = [
            [*weighted, (row, -1.0)]
            for weighted, ((row, _),) in zip(annealed, control, strict=True)
        ]
        for series, weighted in zip(SERIES, (annealed, control), strict=True):
            estimate = paired.estimate(weighted, spec, FIGURE)
            errors.append(head | {"series": series} | _values(DIVERGENCE, estimate))
        estimate = paired.estimate(change, spec, FIGURE)
        p_value = {"p, not corrected": estimate.p_value()}
        differences.append(head | p_value | _values(DIFFERENCE, estimate))
    panels = [
        (rows, _panel(rows, canvas.runs, quantity))
        for rows, quantity in ((errors, DIVERGENCE), (differences, DIFFERENCE))
        if rows
    ]
    return drawn(panels, 2)


def _values(quantity: Quantity, estimate: Estimate) -> dict[str, float]:
    return quantity.values(estimate.value, estimate.interval())


def _panel(rows: Rows, runs: Runs, quantity: Quantity) -> Chart:
    """Points with their intervals above the name of the group, annealed beside not annealed.

    Groups have their colours, as in all figures; the marker says what is annealed.
    """
    axis = {"labelAngle": 0}
    x: Chart = {"field": runs.heading, "type": "nominal", "sort": None, "axis": axis}
    groups = {group: looks[0].colour for group, looks in runs.groups.items()}
    own = list(dict.fromkeys(row[runs.heading] for row in rows))
    scale = {"domain": own, "range": [groups[group] for group in own]}
    colour = {"field": runs.heading, "type": "nominal", "scale": scale, "legend": None}
    encoding: Chart = {"x": x, "y": quantity.encoding(), "color": colour}
    point: Chart = {"tooltip": tooltip(rows)}
    if "series" in rows[0]:
        series = {"field": "series", "type": "nominal", "title": "at equal tokens"}
        encoding |= {"xOffset": series | {"sort": list(SERIES)}}
        point |= {"shape": series | {"scale": {"domain": list(SERIES), "range": list(SHAPES)}}}
    low, high = (f"{quantity.label}, {end}" for end in ("low", "high"))
    bar = {"y": quantity.encoding(low), "y2": {"field": high}}
    layers = [
        {"mark": {"type": "rule", "strokeWidth": 1.6}, "encoding": bar},
        {"mark": {"type": "point", "filled": True, "opacity": 1, "size": 55}, "encoding": point},
    ]
    title = rows[0]["panel"] if quantity is DIVERGENCE else "Paired difference"
    return panel([level(0.0), data(rows, encoding=encoding, layer=layers)], title, 2, PANEL_HEIGHT)
