"""What the table says in a few numbers and sentences: a row per run, and findings only where models are told apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from study.collect import trained
from study.paired import TRACE, Order, Paired, Row, Verdict
from study.released import ReleasedRun
from study.settings import Study, spec_title
from train.config import RunConfig

HIGH, DECAYED = 0.99, 0.5  # shares of the largest learning rate: at least, and at most
Rows = list[dict[str, Any]]
AnyRun = RunConfig | ReleasedRun


@dataclass(frozen=True)
class Estimate:
    """A number with the interval of its result."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RunSummary:
    """One run that training was meant to end with.

    Attributes:
        label: what tells it apart in legends.
        run: its configuration, or the released model's stage.
        anneals: the learning rate decays at its end.
        first: row of the last checkpoint before the decay, of its parent for a branch; None where there is none.
        last: row of the last checkpoint of the run.
    """

    label: str
    run: AnyRun
    anneals: bool
    first: Row | None
    last: Row | None


def estimate(row: Row | None, column: str) -> Estimate | None:
    """A column of a row with its `_low` and `_high`."""
    if row is None or row[column] is None:
        return None
    return Estimate(row[column], row[f"{column}_low"], row[f"{column}_high"])


def in_order(study: Study) -> list[AnyRun]:
    """The runs by rising peak learning rate, or by what the study varies; those without a value first."""

    def rank(run: AnyRun) -> float:
        if study.varied:
            return study.varied.values.get(run.name, float("-inf"))
        return run.optimizer.peak_lr if isinstance(run, RunConfig) else 0.0

    return sorted(study.runs, key=rank)


def lineage(study: Study, rows: Rows, run: AnyRun) -> Rows:
    """All rows that led to the end of a run: for a branch those of its parent up to there, then its own."""
    own = [row for row in rows if row["run"] == run.name]
    if isinstance(run, ReleasedRun) or run.branch_from is None:
        return own
    step = run.branch_from.step
    return [row for row in lineage(study, rows, study.parent_of(run)) if row["step"] <= step] + own


def at_high_rate(rows: Rows) -> Rows:
    """Of one lineage, the weights after the warm-up whose learning rate is nearly the largest that is known."""
    rates = [row["learning_rate"] or 0.0 for row in rows]
    high = HIGH * max(rates, default=0.0)
    kept = [row for row, rate in zip(rows, rates, strict=True) if 0 < rate >= high]
    return [row for row in trained(kept) if row["phase"] != "warmup"]


def ends_of_training(study: Study) -> list[AnyRun]:
    """The runs in order, less those that others branch from and that do not anneal themselves."""
    parents = {study.parent_of(run).name for run in study.trained if run.branch_from}
    return [run for run in in_order(study) if run.name not in parents or _anneals(run)]


def _anneals(run: AnyRun) -> bool:
    return isinstance(run, RunConfig) and run.schedule.anneal is not None


def summarize(study: Study, rows: Rows) -> list[RunSummary]:
    """One summary per run that is an end of training, in order."""
    summaries = []
    for run in ends_of_training(study):
        led = lineage(study, rows, run)
        last = next((row for row in trained(led) if row["run"] == run.name and row["step"] == run.total_steps), None)
        if isinstance(run, ReleasedRun):
            first, anneals = _before_decay(led, last)
        else:
            stable = [row for row in trained(led) if row["phase"] == "stable"]
            anneals = _anneals(run)
            first = stable[-1] if stable and anneals else None
        summaries.append(RunSummary(study.label_of(run), run, anneals, first, last))
    return summaries


def _before_decay(rows: Rows, last: Row | None) -> tuple[Row | None, bool]:
    """Of a released run, whose phases are unknown: by its learning rates, where they are known."""
    high = at_high_rate(rows)
    if last is None or last["learning_rate"] is None or not high:
        return None, False
    decays = last["learning_rate"] <= DECAYED * high[-1]["learning_rate"]
    return (high[-1] if decays else None), decays


def listed(labels: Sequence[str]) -> str:
    """'a, b and c'."""
    return ", ".join(labels[:-1]) + f" and {labels[-1]}" if len(labels) > 1 else "".join(labels)


def last_rows(summaries: list[RunSummary], column: str) -> dict[str, Row] | None:
    """Label -> last row, where every run has one in which the column is measured; otherwise None."""
    ends = {summary.label: summary.last for summary in summaries}
    found = {label: row for label, row in ends.items() if row and row.get(column) is not None}
    return found if len(found) == len(summaries) else None


def anneal_finding(changes: dict[str, Verdict], quantity: str, heading: str) -> str:
    """Whether `quantity` rose or fell over the anneal; `changes` has for each run how its end lies to its start."""
    phrases = {
        "higher": "rose for {} {}",
        "lower": "fell for {} {}",
        "not told apart": "shows no change for {} {} that could be told from none",
    }
    parts = []
    for verdict, phrase in phrases.items():
        labels = [label for label, found in changes.items() if found == verdict]
        if labels:
            parts.append(phrase.format(heading, listed(labels)))
    return f"Over the anneal, {quantity} {'; it '.join(parts)}."


def order_finding(order: Order, quantity: str, heading: str) -> str:
    """How `quantity` of the last checkpoints is ordered by run, for the pairs that are told apart."""
    head = f"At the end of training, {quantity}"
    labels = list(dict.fromkeys(label for pair in order for label in pair))
    steps = {order[pair] for pair in pairwise(labels)}
    if steps == {"higher"}:
        return f"{head} rises with every step of the {heading}."
    if steps == {"lower"}:
        return f"{head} falls with every step of the {heading}."
    below = {"higher": "{0} below {1}", "lower": "{1} below {0}"}
    apart = [below[verdict].format(*pair) for pair, verdict in order.items() if verdict in below]
    if not apart:
        return f"{head} does not tell any two runs apart ({heading} {listed(labels)})."
    rest = "" if len(apart) == len(order) else "; the other pairs are not told apart"
    return f"{head} orders the runs by {heading}: {listed(apart)}{rest}."


def loss_finding(losses: dict[str, float], order: Order, heading: str) -> str:
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
    return f"The lowest final loss is {losses[best]:.3f} nats per token, at {heading} {best}{rest}."


def findings(study: Study, summaries: list[RunSummary], paired: Paired) -> list[str]:
    """Plain sentences that the numbers bear out, for what is measured of every run."""
    spec = study.quantization.specs[0]
    sentences = []
    ends = last_rows(summaries, f"quant/{spec}/cross_entropy")
    if ends:
        losses = {label: row[f"quant/{spec}/cross_entropy"] for label, row in ends.items()}
        sentences.append(loss_finding(losses, paired.order(ends, spec, "cross_entropy"), study.heading))
    for spec in study.quantization.specs:
        for figure, name in (("relative_error", "quantization error"), ("kl_divergence", "KL divergence")):
            column, quantity = f"quant/{spec}/{figure}", f"the {name} ({spec_title(spec)})"
            pairs = _both_ends(summaries, column)
            if pairs:
                verdicts = paired.verdicts(list(pairs.values()), spec, figure)
                changes = dict(zip(pairs, verdicts, strict=True))
                sentences.append(anneal_finding(changes, quantity, study.heading))
            ends = last_rows(summaries, column)
            if ends and len(ends) > 1:
                sentences.append(order_finding(paired.order(ends, spec, figure), quantity, study.heading))
    traces, quantity = _both_ends(summaries, TRACE), "the trace of the Hessian"
    if traces:
        changes = dict(zip(traces, paired.traces(list(traces.values())), strict=True))
        sentences.append(anneal_finding(changes, quantity, study.heading))
    ends = last_rows(summaries, TRACE)
    if ends and len(ends) > 1:
        sentences.append(order_finding(paired.order_of_traces(ends), quantity, study.heading))
    return sentences


def _both_ends(summaries: list[RunSummary], column: str) -> dict[str, tuple[Row, Row]] | None:
    """Label -> rows before and after the anneal, where every run that anneals has both; otherwise None."""
    annealed = [summary for summary in summaries if summary.anneals]
    pairs = {
        summary.label: (summary.first, summary.last)
        for summary in annealed
        if summary.first and summary.last and None not in (summary.first.get(column), summary.last.get(column))
    }
    return pairs if len(pairs) == len(annealed) else None
