"""Averages of weights beside the weights themselves: whether averaging can take the place of an anneal."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quant_eval.specs import parse_spec
from study.recipes import Study, spec_title
from study.summary import Estimate, Rows, estimate, listed
from train.config import RunConfig
from train.settings import Ema, Lawa


@dataclass(frozen=True)
class Compared:
    """One model of the comparison: weights after a step, or an average at that step.

    Attributes:
        label: the peak learning rate of the run.
        model: what it is, in words.
        estimates: column of the table -> the figure with its interval.
    """

    label: str
    model: str
    estimates: dict[str, Estimate | None]


def average_title(average: Lawa | Ema) -> str:
    """'LAWA, 5 weights 16 steps apart' for lawa5x16."""
    if isinstance(average, Lawa):
        return f"LAWA, {average.window} weights {average.interval_steps} steps apart"
    return f"EMA, decay {average.decay:g} every {average.interval_steps} steps"


def average_label(average: Lawa | Ema, others: Iterable[Lawa | Ema]) -> str:
    """'LAWA', or its whole name where `others` holds a second of its kind."""
    alone = sum(other.kind == average.kind for other in others) == 1
    return average.kind.upper() if alone else average.name


def compared_columns(study: Study) -> list[str]:
    """Columns of the table that a comparison shows: loss, then quantized loss, error and divergence of each spec."""
    specs = study.quantization.specs
    figures = ("cross_entropy_quantized", "relative_error", "kl_divergence")
    return [f"quant/{specs[0]}/cross_entropy", *(f"quant/{spec}/{figure}" for spec in specs for figure in figures)]


def compare(study: Study, rows: Rows) -> list[Compared]:
    """At every step with an average, by rising peak learning rate: the weights, then their averages."""
    columns = compared_columns(study)
    compared = []
    for run in _by_peak(study):
        titles = {average.name: average_title(average) for average in run.averages}
        own = [row for row in rows if row["run"] == run.name]
        averaged = {row["step"] for row in own if row["average"]}
        for row in own:
            if row["step"] in averaged:
                model = titles[row["average"]] if row["average"] else f"step {row['step']}, {_phase(run, row)}"
                estimates = {column: estimate(row, column) for column in columns}
                compared.append(Compared(f"{run.optimizer.peak_lr:g}", model, estimates))
    return compared


def _phase(run: RunConfig, row: dict[str, Any]) -> str:
    if row["phase"] != "anneal":
        return "before the anneal" if run.schedule.anneal else row["phase"]
    return "annealed" if row["step"] == run.total_steps else "in the anneal"


def _by_peak(study: Study) -> list[RunConfig]:
    return sorted(study.runs, key=lambda run: run.optimizer.peak_lr)


def _clause(quantity: str, pairs: list[tuple[str, Estimate, Estimate]]) -> str:
    """How the first estimate of each labelled pair lies to the second; order is claimed where intervals lie apart."""
    groups: dict[str, list[str]] = {"lower": [], "higher": [], "not told apart": []}
    for label, average, annealed in pairs:
        apart = "lower" if average.is_below(annealed) else "higher" if annealed.is_below(average) else "not told apart"
        groups[apart].append(label)
    if len(groups["not told apart"]) == len(pairs):
        return f"{quantity} is not told apart at any peak"
    parts = [
        f"{word} at {'every peak' if len(labels) == len(pairs) else listed(labels)}"
        for word, labels in groups.items()
        if labels
    ]
    return f"{quantity} is {', '.join(parts)}"


def average_findings(study: Study, rows: Rows) -> list[str]:
    """A sentence per average: its last model before the anneal against the annealed weights, at the lowest width."""
    spec = min(study.quantization.specs, key=lambda spec: parse_spec(spec).bits)
    quantities = {
        "cross_entropy": "the full-precision loss",
        "cross_entropy_quantized": f"the quantized loss ({spec_title(spec)})",
        "kl_divergence": "the KL divergence there",
    }
    sentences = []
    for average in dict.fromkeys(average for run in study.runs for average in run.averages):
        clauses = []
        for figure, quantity in quantities.items():
            pairs = _pairs(study, rows, average.name, f"quant/{spec}/{figure}")
            if pairs:
                clauses.append(_clause(quantity, pairs))
        if clauses:
            head = f"{average_title(average)}, before the anneal against the annealed weights"
            sentences.append(f"{head}: {'; '.join(clauses)}.")
    return sentences


def _pairs(study: Study, rows: Rows, average: str, column: str) -> list[tuple[str, Estimate, Estimate]]:
    """By peak learning rate: the column of the average's last model before the anneal, and of the annealed weights."""
    pairs = []
    for run in _by_peak(study):
        own = [row for row in rows if row["run"] == run.name]
        before = [row for row in own if row["average"] == average and row["phase"] == "stable"]
        after = [row for row in own if not row["average"] and row["phase"] == "anneal"]
        if before and after and after[-1]["step"] == run.total_steps:
            averaged, annealed = estimate(before[-1], column), estimate(after[-1], column)
            if averaged and annealed:
                pairs.append((f"{run.optimizer.peak_lr:g}", averaged, annealed))
    return pairs
