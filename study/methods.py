"""Quantization methods side by side at the end of training: a figure, and whether they agree on the learning rates."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from quant_eval.specs import parse_spec
from study.canvas import Look, legend_above, logarithmic, looks_of, panels_of, save
from study.collect import trained
from study.paired import Order, Paired, Row
from study.settings import Study, spec_title
from study.summary import Rows, RunSummary, last_rows

FIGURES = {"kl_divergence": "KL divergence", "relative_error": "relative error"}
SPREAD, STEP = 0.8, 0.2  # the room of one method, and how far apart marks are where there is more than they need


def shown_methods(study: Study) -> list[str]:
    """Every spec of the last checkpoints, by rising number of bits."""
    return sorted(study.quantization.at_the_end, key=lambda spec: parse_spec(spec).bits)


def draw_methods(study: Study, rows: Rows, path: Path) -> None:
    """KL divergence (logarithmic axis) and relative error of the last checkpoints: a line of marks per method."""
    specs, looks = shown_methods(study), looks_of(study)
    figure, axes = panels_of(2, height=1.4 + 0.52 * len(specs), sharey=True)
    ends = {run.name: run.total_steps for run in study.runs}
    last = {row["run"]: row for row in trained(rows) if row["step"] == ends[row["run"]]}
    for axis, measure in zip(axes, FIGURES, strict=True):
        for place, spec in enumerate(specs):
            for index, (run, look) in enumerate(looks.items()):
                offset = min(STEP, SPREAD / len(looks)) * (index - (len(looks) - 1) / 2)
                if run in last:
                    _mark(axis, last[run], f"quant/{spec}/{measure}", place + offset, look)
        axis.grid(visible=False, axis="y")
        axis.tick_params(axis="y", length=0)
        for edge in range(1, len(specs)):
            axis.axhline(edge - 0.5, color="#dddddd", linewidth=0.6, zorder=0)
    left, right = axes
    left.set_yticks(range(len(specs)), [spec_title(spec).replace(", ", "\n", 1) for spec in specs])
    left.set_ylim(len(specs) - 0.5, -0.5)
    left.set_xlabel("KL(full || quantized), nats per token")
    if left.containers:
        logarithmic(left, "x")
    right.set_xlabel("relative error of the loss")
    right.xaxis.set_major_formatter(PercentFormatter(1.0))
    right.axvline(0, color="#999999", linewidth=0.8, zorder=0)
    legend_above(figure, "peak learning rate", looks.values())
    save(figure, path)


def _mark(axis: Axes, row: Row, column: str, place: float, look: Look) -> None:
    value: Any = row[column]
    if value is None:
        return
    bars = [[value - row[f"{column}_low"]], [row[f"{column}_high"] - value]]
    axis.errorbar([value], [place], xerr=bars, fmt=look.marker, color=look.colour, elinewidth=1.0, capsize=2)


def method_findings(study: Study, summaries: list[RunSummary], paired: Paired) -> list[str]:
    """For every further method whether the order of the peak learning rates found with the first spec holds."""
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
                f"{spec_title(spec)}, keeps the order of the peak learning rates that {spec_title(first)}, shows at "
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
