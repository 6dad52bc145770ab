"""What the table says in a few numbers and sentences: a row per run, and findings only where intervals lie apart."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from study.collect import trained
from study.settings import Study, spec_title

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Estimate:
    """A number with the interval of its result."""

    value: float
    low: float
    high: float

    def is_below(self, other: "Estimate") -> bool:
        """Whether the whole interval lies below the other's."""
        return self.high < other.low


@dataclass(frozen=True)
class RunSummary:
    """One run.

    Attributes:
        label: the peak learning rate.
        loss: full-precision loss of the last checkpoint on the evaluation text, nats per token.
        before: per measurement, the last checkpoint before the anneal.
        after: per measurement, the last checkpoint of the run.
    """

    label: str
    loss: Estimate | None
    before: dict[str, Estimate | None]
    after: dict[str, Estimate | None]


def estimate(row: dict[str, Any] | None, column: str) -> Estimate | None:
    """A column of a row with its `_low` and `_high`; the trace with two standard errors on either side."""
    if row is None or row[column] is None:
        return None
    value = row[column]
    if f"{column}_standard_error" in row:
        margin = 2 * row[f"{column}_standard_error"]
        return Estimate(value, value - margin, value + margin)
    return Estimate(value, row[f"{column}_low"], row[f"{column}_high"])


def summarize(study: Study, rows: Rows) -> list[RunSummary]:
    """One summary per run, by rising peak learning rate."""
    figures = ("relative_error", "kl_divergence")
    columns = [f"quant/{spec}/{figure}" for spec in study.quantization.specs for figure in figures]
    columns.append("curvature/trace")
    summaries = []
    for run in sorted(study.runs, key=lambda run: run.optimizer.peak_lr):
        own = {row["step"]: row for row in trained(rows) if row["run"] == run.name}
        stable = [row for row in own.values() if row["phase"] == "stable"]
        first, last = stable[-1] if stable and run.schedule.anneal else None, own.get(run.total_steps)
        summaries.append(
            RunSummary(
                label=f"{run.optimizer.peak_lr:g}",
                loss=estimate(last, f"quant/{study.quantization.specs[0]}/cross_entropy"),
                before={column: estimate(first, column) for column in columns},
                after={column: estimate(last, column) for column in columns},
            )
        )
    return summaries


def listed(labels: list[str]) -> str:
    """'a, b and c'."""
    return ", ".join(labels[:-1]) + f" and {labels[-1]}" if len(labels) > 1 else "".join(labels)


def anneal_finding(summaries: list[RunSummary], column: str, quantity: str) -> str | None:
    """Whether `quantity` rose or fell over the anneal, for the runs whose two intervals lie apart."""
    rose: list[str] = []
    fell: list[str] = []
    unclear: list[str] = []
    for summary in summaries:
        before, after = summary.before[column], summary.after[column]
        if before is None or after is None:
            return None
        group = rose if before.is_below(after) else fell if after.is_below(before) else unclear
        group.append(summary.label)
    parts = [
        f"{verb} for peak learning rate{'s' if len(labels) > 1 else ''} {listed(labels)}"
        for verb, labels in (("rose", rose), ("fell", fell))
        if labels
    ]
    if unclear:
        parts.append(f"shows no change beyond its intervals for {listed(unclear)}")
    return f"Over the anneal, {quantity} {'; it '.join(parts)}."


def order_finding(summaries: list[RunSummary], column: str, quantity: str) -> str | None:
    """How `quantity` of the last checkpoints is ordered by peak learning rate, for pairs whose intervals lie apart."""
    values = [(summary.label, summary.after[column]) for summary in summaries]
    known = [(label, value) for label, value in values if value is not None]
    if len(known) < len(values) or len(known) < 2:
        return None
    head = f"At the end of training, {quantity}"
    if all(low.is_below(high) for (_, low), (_, high) in pairwise(known)):
        return f"{head} rises with every step of the peak learning rate."
    if all(high.is_below(low) for (_, low), (_, high) in pairwise(known)):
        return f"{head} falls with every step of the peak learning rate."
    apart = [
        f"{label} below {other}"
        for label, value in known
        for other, other_value in known
        if value.is_below(other_value)
    ]
    if not apart:
        return f"{head} does not tell any two peak learning rates apart: all intervals overlap."
    return f"{head} orders these peak learning rates: {listed(apart)}; the intervals of the other pairs overlap."


def loss_finding(summaries: list[RunSummary]) -> str | None:
    """Which run ends with the lowest loss and which others its interval does not exclude."""
    known = [(summary.label, summary.loss) for summary in summaries if summary.loss is not None]
    if not known:
        return None
    label, best = min(known, key=lambda pair: pair[1].value)
    rivals = [other for other, loss in known if other != label and not best.is_below(loss)]
    rest = f"; the intervals of {listed(rivals)} overlap with it" if rivals else ", apart from all others"
    return f"The lowest final loss is {best.value:.3f} nats per token, at a peak learning rate of {label}{rest}."


def findings(study: Study, summaries: list[RunSummary]) -> list[str]:
    """Plain sentences that the numbers bear out."""
    sentences = [loss_finding(summaries)]
    for spec in study.quantization.specs:
        for figure, name in (("relative_error", "quantization error"), ("kl_divergence", "KL divergence")):
            column, quantity = f"quant/{spec}/{figure}", f"the {name} ({spec_title(spec)})"
            sentences += [anneal_finding(summaries, column, quantity), order_finding(summaries, column, quantity)]
    sentences.append(anneal_finding(summaries, "curvature/trace", "the trace of the Hessian"))
    return [sentence for sentence in sentences if sentence]
