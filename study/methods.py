"""Quantization methods side by side at the end of training: a figure, and whether they agree on the learning rates."""

from dataclasses import replace

from quant_eval.specs import parse_spec
from study.canvas import Canvas, facts_of
from study.paired import Order, Paired
from study.plots import Axis, Line, Panel, Plot, Point, Series, logarithmic
from study.settings import Study, spec_title
from study.summary import RunSummary, last_rows
from study.trajectories import DIVERGENCE, ERROR

FIGURES = {"kl_divergence": "KL divergence", "relative_error": "relative error"}
SPREAD, STEP = 0.8, 0.2  # the room of one method, and how far apart marks are where there is more than they need


def shown_methods(study: Study) -> list[str]:
    """Every spec of the last checkpoints, by rising number of bits."""
    return sorted(study.quantization.at_the_end, key=lambda spec: parse_spec(spec).bits)


def methods_plot(canvas: Canvas) -> Plot:
    """KL divergence (logarithmic axis) and relative error of the last checkpoints: a line of marks per method."""
    specs = shown_methods(canvas.study)
    ticks = tuple((float(place), spec_title(spec).replace(", ", "\n", 1)) for place, spec in enumerate(specs))
    y = Axis(title="", is_place=True, ticks=ticks, limits=(len(specs) - 0.5, -0.5))
    edges = tuple(Line(place + 0.5, kind="faint") for place in range(len(specs) - 1))
    divergences, errors = _marks(canvas, specs, "kl_divergence"), _marks(canvas, specs, "relative_error")
    x = replace(DIVERGENCE, holds_zero=False)
    panels = (
        Panel(x=logarithmic(x, _values(divergences)), y=y, series=divergences, lines=edges),
        Panel(x=replace(ERROR, holds_zero=False), y=y, series=errors, lines=(*edges, Line(0.0, "x"))),
    )
    return Plot(panels=panels, height=1.4 + 0.52 * len(specs), shares_y=True, **canvas.legend)


def _marks(canvas: Canvas, specs: list[str], figure: str) -> tuple[Series, ...]:
    """Of every run its marks, one method below the other, beside those of the other runs."""
    last, series = canvas.last_rows(), []
    for index, (run, look) in enumerate(canvas.looks.items()):
        offset = min(STEP, SPREAD / len(canvas.looks)) * (index - (len(canvas.looks) - 1) / 2)
        points = []
        for place, spec in enumerate(specs):
            column = f"quant/{spec}/{figure}"
            row = last.get(run, {})
            if row.get(column) is not None:
                interval = (row[f"{column}_low"], row[f"{column}_high"])
                facts = {"method": spec_title(spec)} | facts_of(row)
                points.append(Point(x=row[column], y=place + offset, x_interval=interval, facts=facts))
        series.append(Series(replace(look.mark, line="", bar=1.0), tuple(points), look.label))
    return tuple(series)


def _values(series: tuple[Series, ...]) -> list[float]:
    return [point.x for one in series for point in one.points]


def method_findings(study: Study, summaries: list[RunSummary], paired: Paired) -> list[str]:
    """For every further method whether the order of the runs found with the first spec holds."""
    first, *_ = study.quantization.specs

    def orders(spec: str) -> dict[str, Order]:
        ends = {figure: last_rows(summaries, f"quant/{spec}/{figure}") for figure in FIGURES}
        return {figure: paired.order(rows, spec, figure) for figure, rows in ends.items() if rows}

    known = {figure: order for figure, order in orders(first).items() if set(order.values()) - {"not told apart"}}
    sentences = []
    for spec in study.quantization.methods:
        found = orders(spec)
        clauses = [order_clause(known[one], found[one], FIGURES[one]) for one in known if one in found]
        if clauses:
            sentences.append(
                f"{spec_title(spec)}, keeps the order by {study.heading} that {spec_title(first)}, shows at "
                f"the end of training {' and '.join(clauses)}."
            )
    return sentences


def order_clause(known: Order, own: Order, quantity: str) -> str:
    """For how many pairs that `known` tells apart `own` does so too, and the same way; the others by name."""
    apart = [pair for pair, verdict in known.items() if verdict != "not told apart"]
    groups = {
        "not told apart here": [pair for pair in apart if own[pair] == "not told apart"],
        "reversed": [pair for pair in apart if own[pair] not in (known[pair], "not told apart")],
        "told apart here alone": [pair for pair in own if pair not in apart and own[pair] != "not told apart"],
    }
    kept = sum(own[pair] == known[pair] for pair in apart)
    of = f"{len(apart)} pair{'s' if len(apart) > 1 else ''}"
    count = f"for all {of}" if kept == len(apart) > 1 else f"for {kept} of {of}"
    others = "; ".join(
        f"{words}: {', '.join(' vs '.join(pair) for pair in pairs)}" for words, pairs in groups.items() if pairs
    )
    return f"{count} told apart by {quantity}{f' ({others})' if others else ''}"
