"""Averages of weights beside the weights themselves: whether averaging can take the place of an anneal.

Two kinds: those kept in training (LAWA windows, EMAs), and soups of exported checkpoints.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quant_eval.specs import parse_spec
from study.paired import Paired, Row, Verdict
from study.settings import SoupSettings, Study, spec_title
from study.summary import Estimate, Rows, estimate, listed
from train.config import RunConfig
from train.settings import Ema, Lawa

Choice = Callable[[RunConfig, Rows], Row | None]  # one of a run's rows


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


def kept_averages(study: Study) -> list[Lawa | Ema]:
    """The averages that the runs keep in training, each once."""
    return list(dict.fromkeys(average for run in study.runs for average in run.averages))


def average_title(average: Lawa | Ema | SoupSettings) -> str:
    """'LAWA, 5 weights 16 steps apart' for lawa5x16, 'soup of steps 592 and 640' for a soup."""
    if isinstance(average, SoupSettings):
        return f"soup of steps {listed([str(step) for step in average.steps])}"
    if isinstance(average, Lawa):
        return f"LAWA, {average.window} weights {average.interval_steps} steps apart"
    return f"EMA, decay {average.decay:g} every {average.interval_steps} steps"


def average_label(average: Lawa | Ema, others: Iterable[Lawa | Ema]) -> str:
    """'LAWA', or its whole name where `others` holds a second of its kind."""
    alone = sum(other.kind == average.kind for other in others) == 1
    return average.kind.upper() if alone else average.name


def lowest_spec(study: Study) -> str:
    """The spec of the fewest bits: there quantization costs most."""
    return min(study.quantization.specs, key=lambda spec: parse_spec(spec).bits)


def compared_columns(study: Study) -> list[str]:
    """Columns of the table that a comparison shows: loss, then quantized loss, error and divergence of each spec."""
    specs = study.quantization.specs
    figures = ("cross_entropy_quantized", "relative_error", "kl_divergence")
    return [f"quant/{specs[0]}/cross_entropy", *(f"quant/{spec}/{figure}" for spec in specs for figure in figures)]


def compare(study: Study, rows: Rows) -> list[Compared]:
    """By rising peak learning rate, the weights and their averages at the end of each phase and of each soup."""
    columns = compared_columns(study)
    titles = {average.name: average_title(average) for average in (*kept_averages(study), *study.soups)}
    soups = {soup.name for soup in study.soups}
    compared = []
    for run in _by_peak(study):
        own = [row for row in rows if row["run"] == run.name]
        averaged = [row for row in own if row["average"]]
        last_of_phase = {row["phase"]: row["step"] for row in averaged}
        steps = {*last_of_phase.values(), *(row["step"] for row in averaged if row["average"] in soups)}
        for row in own:
            if row["step"] in steps:
                model = titles[row["average"]] if row["average"] else f"step {row['step']}, {_phase(run, row)}"
                estimates = {column: estimate(row, column) for column in columns}
                compared.append(Compared(study.label_of(run), model, estimates))
    return compared


def _phase(run: RunConfig, row: Row) -> str:
    if row["phase"] != "anneal":
        return "before the anneal" if run.schedule.anneal else row["phase"]
    return "annealed" if row["step"] == run.total_steps else "in the anneal"


def _by_peak(study: Study) -> list[RunConfig]:
    return sorted(study.runs, key=lambda run: run.optimizer.peak_lr)


def _clause(quantity: str, verdicts: dict[str, Verdict]) -> str:
    """How the first of each labelled pair of models lies to the second."""
    groups: dict[Verdict, list[str]] = {"lower": [], "higher": [], "not told apart": []}
    for label, verdict in verdicts.items():
        groups[verdict].append(label)
    if len(groups["not told apart"]) == len(verdicts):
        return f"{quantity} is not told apart at any peak"
    parts = [
        f"{word} at {'every peak' if len(labels) == len(verdicts) else listed(labels)}"
        for word, labels in groups.items()
        if labels
    ]
    return f"{quantity} is {', '.join(parts)}"


def _average(name: str, key: str, value: Any) -> Choice:
    """The last model of an average among the rows with this value."""

    def choose(_run: RunConfig, own: Rows) -> Row | None:
        found = [row for row in own if row["average"] == name and row[key] == value]
        return found[-1] if found else None

    return choose


def _annealed(run: RunConfig, own: Rows) -> Row | None:
    """The last weights of a run that ends with an anneal."""
    weights = [row for row in own if not row["average"] and row["phase"] == "anneal"]
    return weights[-1] if weights and weights[-1]["step"] == run.total_steps else None


def average_findings(study: Study, rows: Rows, paired: Paired) -> list[str]:
    """A sentence per comparison, at the lowest width: which of two models has the lower losses and divergence.

    Averages kept in training, the last ones before the anneal, and soups are compared with the annealed weights; soups
    also with the averages kept in training at their last step.
    """
    comparisons: list[tuple[str, Choice, Choice]] = []
    for average in kept_averages(study):
        head = f"{average_title(average)}, before the anneal against the annealed weights"
        comparisons.append((head, _average(average.name, "phase", "stable"), _annealed))
    for soup in study.soups:
        last = soup.steps[-1]
        made, title = _average(soup.name, "step", last), average_title(soup).capitalize()
        comparisons.append((f"{title}, against the annealed weights", made, _annealed))
        for average in kept_averages(study):
            head = f"{title}, against {average_label(average, kept_averages(study))} at step {last}"
            comparisons.append((head, made, _average(average.name, "step", last)))
    sentences = [_sentence(study, rows, paired, *comparison) for comparison in comparisons]
    return [sentence for sentence in sentences if sentence]


def _sentence(study: Study, rows: Rows, paired: Paired, head: str, first: Choice, second: Choice) -> str | None:
    spec = lowest_spec(study)
    quantities = {
        "cross_entropy": "the full-precision loss",
        "cross_entropy_quantized": f"the quantized loss ({spec_title(spec)})",
        "kl_divergence": "the KL divergence there",
    }
    clauses = []
    for figure, quantity in quantities.items():
        pairs = _pairs(study, rows, first, second, f"quant/{spec}/{figure}")
        if pairs:
            verdicts = paired.verdicts(list(pairs.values()), spec, figure)
            clauses.append(_clause(quantity, dict(zip(pairs, verdicts, strict=True))))
    return f"{head}: {'; '.join(clauses)}." if clauses else None


def _pairs(study: Study, rows: Rows, first: Choice, second: Choice, column: str) -> dict[str, tuple[Row, Row]]:
    """By peak learning rate: the second and the first chosen model, for the runs that have the column of both."""
    pairs = {}
    for run in _by_peak(study):
        own = [row for row in rows if row["run"] == run.name]
        one, other = first(run, own), second(run, own)
        if one and other and None not in (one[column], other[column]):
            pairs[study.label_of(run)] = (other, one)
    return pairs
