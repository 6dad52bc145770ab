"""What the table says in a few numbers and sentences: a row per run, and findings only where models are told apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from study.collect import trained
from study.paired import TRACE, Order, Paired, Row, Verdict
from study.settings import Study, spec_title

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Estimate:
    """A number with the interval of its result."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RunSummary:
    """One run.

    Attributes:
        label: the peak learning rate.
        first: row of the last checkpoint before the anneal; None where there is none.
        last: row of the last checkpoint of the run.
    """

    label: str
    first: Row | None
    last: Row | None


def estimate(row: Row | None, column: str) -> Estimate | None:
    """A column of a row with its `_low` and `_high`."""
    if row is None or row[column] is None:
        return None
    return Estimate(row[column], row[f"{column}_low"], row[f"{column}_high"])


def summarize(study: Study, rows: Rows) -> list[RunSummary]:
    """One summary per run, by rising peak learning rate."""
    summaries = []
    for run in sorted(study.runs, key=lambda run: run.optimizer.peak_lr):
        own = {row["step"]: row for row in trained(rows) if row["run"] == run.name}
        stable = [row for row in own.values() if row["phase"] == "stable"]
        first = stable[-1] if stable and run.schedule.anneal else None
        summaries.append(RunSummary(study.label_of(run), first, own.get(run.total_steps)))
    return summaries


def listed(labels: Sequence[str]) -> str:
    """'a, b and c'."""
    return ", ".join(labels[:-1]) + f" and {labels[-1]}" if len(labels) > 1 else "".join(labels)


def last_rows(summaries: list[RunSummary], column: str) -> dict[str, Row] | None:
    """Label -> last row, where every run has one in which the column is measured; otherwise None."""
    found = {summary.label: summary.last for summary in summaries if summary.last and summary.last[column] is not None}
    return found if len(found) == len(summaries) else None


def anneal_finding(changes: dict[str, Verdict], quantity: str) -> str:
    """Whether `quantity` rose or fell over the anneal; `changes` has for each run how its end lies to its start."""
    phrases = {
        "higher": "rose for peak learning rate{} {}",
        "lower": "fell for peak learning rate{} {}",
        "not told apart": "shows no change for peak learning rate{} {} that could be told from none",
    }
    parts = []
    for verdict, phrase in phrases.items():
        labels = [label for label, found in changes.items() if found == verdict]
        if labels:
            parts.append(phrase.format("s" if len(labels) > 1 else "", listed(labels)))
    return f"Over the anneal, {quantity} {'; it '.join(parts)}."


def order_finding(order: Order, quantity: str) -> str:
    """How `quantity` of the last checkpoints is ordered by peak learning rate, for the pairs that are told apart."""
    head = f"At the end of training, {quantity}"
    labels = list(dict.fromkeys(label for pair in order for label in pair))
    steps = {order[pair] for pair in pairwise(labels)}
    if steps == {"higher"}:
        return f"{head} rises with every step of the peak learning rate."
    if steps == {"lower"}:
        return f"{head} falls with every step of the peak learning rate."
    below = {"higher": "{0} below {1}", "lower": "{1} below {0}"}
    apart = [below[verdict].format(*pair) for pair, verdict in order.items() if verdict in below]
    if not apart:
        return f"{head} does not tell any two peak learning rates apart."
    rest = "" if len(apart) == len(order) else "; the other pairs are not told apart"
    return f"{head} orders these peak learning rates: {listed(apart)}{rest}."


def loss_finding(losses: dict[str, float], order: Order) -> str:
    """Which run ends with the lowest loss, and which others are not told apart from it."""
    best = min(losses, key=lambda label: losses[label])
    rivals = [
        second if first == best else first
        for (first, second), verdict in order.items()
        if best in (first, second) and verdict == "not told apart"
    ]
    rest = f"; {listed(rivals)} {'are' if len(rivals) > 1 else 'is'} not told apart from it" if rivals else ""
    if len(losses) > 1 and not rivals:
        rest = ", told apart from all others"
    return f"The lowest final loss is {losses[best]:.3f} nats per token, at a peak learning rate of {best}{rest}."


def findings(study: Study, summaries: list[RunSummary], paired: Paired) -> list[str]:
    """Plain sentences that the numbers bear out, for what is measured of every run."""
    spec = study.quantization.specs[0]
    sentences = []
    ends = last_rows(summaries, f"quant/{spec}/cross_entropy")
    if ends:
        losses = {label: row[f"quant/{spec}/cross_entropy"] for label, row in ends.items()}
        sentences.append(loss_finding(losses, paired.order(ends, spec, "cross_entropy")))
    for spec in study.quantization.specs:
        for figure, name in (("relative_error", "quantization error"), ("kl_divergence", "KL divergence")):
            column, quantity = f"quant/{spec}/{figure}", f"the {name} ({spec_title(spec)})"
            pairs = _both_ends(summaries, column)
            if pairs:
                verdicts = paired.verdicts(list(pairs.values()), spec, figure)
                sentences.append(anneal_finding(dict(zip(pairs, verdicts, strict=True)), quantity))
            ends = last_rows(summaries, column)
            if ends and len(ends) > 1:
                sentences.append(order_finding(paired.order(ends, spec, figure), quantity))
    traces, quantity = _both_ends(summaries, TRACE), "the trace of the Hessian"
    if traces:
        changes = dict(zip(traces, paired.traces(list(traces.values())), strict=True))
        sentences.append(anneal_finding(changes, quantity))
    ends = last_rows(summaries, TRACE)
    if ends and len(ends) > 1:
        sentences.append(order_finding(paired.order_of_traces(ends), quantity))
    return sentences


def _both_ends(summaries: list[RunSummary], column: str) -> dict[str, tuple[Row, Row]] | None:
    """Label -> rows before and after the anneal, where every run has both; otherwise None."""
    pairs = {
        summary.label: (summary.first, summary.last)
        for summary in summaries
        if summary.first and summary.last and None not in (summary.first[column], summary.last[column])
    }
    return pairs if len(pairs) == len(summaries) else None
