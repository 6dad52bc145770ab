"""Averages of weights beside the weights themselves: whether averaging can take the place of an anneal.

Two kinds: those kept in training (LAWA windows, EMAs), and soups of exported checkpoints.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quant_eval.specs import parse_spec
from study.collect import phase_of
from study.paired import Paired, Row, Verdict
from study.released import ReleasedRun
from study.settings import SoupSettings, Study, spec_title
from study.summary import AnyRun, Estimate, Rows, ends_of_training, estimate, in_order, lineage, listed
from train.config import RunConfig
from train.settings import Ema, Lawa

Choice = Callable[[AnyRun, Rows], Row | None]  # one of the rows that led to the end of a run


@dataclass(frozen=True)
class Compared:
    """One model of the comparison: weights after a step, or an average at that step.

    Attributes:
        label: what tells the run apart in legends.
        model: what it is, in words.
        estimates: column of the table -> the figure with its interval.
    """

    label: str
    model: str
    estimates: dict[str, Estimate | None]


def kept_averages(study: Study) -> list[Lawa | Ema]:
    """The averages that the runs keep in training, each once."""
    return list(dict.fromkeys(average for run in study.trained for average in run.averages))


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
    """Run by run in order, the weights and their averages at the end of each phase and of each soup."""
    columns = compared_columns(study)
    titles = {average.name: average_title(average) for average in (*kept_averages(study), *study.soups)}
    soups = {soup.name for soup in study.soups}
    compared = []
    for run in in_order(study):
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


def _phase(run: AnyRun, row: Row) -> str:
    if row["phase"] != "anneal":
        anneals = isinstance(run, RunConfig) and run.schedule.anneal
        return "before the anneal" if anneals else row["phase"]
    return "annealed" if row["step"] == run.total_steps else "in the anneal"


def _clause(quantity: str, verdicts: dict[str, Verdict], heading: str) -> str:
    """How the first of each labelled pair of models lies to the second."""
    groups: dict[Verdict, list[str]] = {"lower": [], "higher": [], "not told apart": []}
    for label, verdict in verdicts.items():
        groups[verdict].append(label)
    if len(groups["not told apart"]) == len(verdicts):
        return f"{quantity} is not told apart in any run"
    parts = [
        f"{word} {'in every run' if len(labels) == len(verdicts) else f'at {heading} {listed(labels)}'}"
        for word, labels in groups.items()
        if labels
    ]
    return f"{quantity} is {', '.join(parts)}"


@dataclass(frozen=True)
class Made:
    """The last model of an average, in a phase or at a step, among the rows that led to the end of a run."""

    name: str
    phase: str | None = None
    step: int | None = None

    def __call__(self, _run: AnyRun, led: Rows) -> Row | None:
        """Its row, where there is one."""
        found = [row for row in led if row["average"] == self.name and self._fits(row["phase"], row["step"])]
        return found[-1] if found else None

    def planned(self, study: Study, run: AnyRun) -> bool:
        """Whether the study measures it, of this run or up to where it branches from another."""
        if isinstance(run, ReleasedRun):
            return False
        led = [(run, run.total_steps)]
        if run.branch_from:
            led.append((study.parent_of(run), run.branch_from.step))
        return any(
            model.average == self.name and model.step <= last and self._fits(phase_of(one, model.step), model.step)
            for one, last in led
            for model in study.models_of(one)
        )

    def _fits(self, phase: str, step: int) -> bool:
        return self.phase in (None, phase) and self.step in (None, step)


def _annealed(run: AnyRun, own: Rows) -> Row | None:
    """The last weights of a run that ends with an anneal."""
    weights = [row for row in own if not row["average"] and row["phase"] == "anneal"]
    return weights[-1] if weights and weights[-1]["step"] == run.total_steps else None


def against_annealed(study: Study) -> dict[str, Made]:
    """Every average that is compared with the annealed weights, by its title: kept ones before the anneal, soups."""
    found = {
        f"{average_title(average)}, before the anneal": Made(average.name, phase="stable")
        for average in kept_averages(study)
    }
    for soup in study.soups:
        found[average_title(soup)] = Made(soup.name, step=soup.steps[-1])
    return found


def average_findings(study: Study, rows: Rows, paired: Paired) -> list[str]:
    """A sentence per comparison, at the lowest width: which of two models has the lower losses and divergence.

    Averages kept in training, the last ones before the anneal, and soups are compared with the annealed weights; soups
    also with the averages kept in training at their last step.
    """
    comparisons: list[tuple[str, Choice, Choice]] = []
    for title, made in against_annealed(study).items():
        comparisons.append((f"{title[0].upper()}{title[1:]}, against the annealed weights", made, _annealed))
    for soup in study.soups:
        last = soup.steps[-1]
        made, title = Made(soup.name, step=last), average_title(soup).capitalize()
        for average in kept_averages(study):
            head = f"{title}, against {average_label(average, kept_averages(study))} at step {last}"
            comparisons.append((head, made, Made(average.name, step=last)))
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
        pairs = average_pairs(study, rows, first, f"quant/{spec}/{figure}", second)
        if pairs:
            verdicts = paired.verdicts(list(pairs.values()), spec, figure)
            clauses.append(_clause(quantity, dict(zip(pairs, verdicts, strict=True)), study.heading))
    return f"{head}: {'; '.join(clauses)}." if clauses else None


def average_pairs(
    study: Study, rows: Rows, first: Choice, column: str, second: Choice = _annealed
) -> dict[str, tuple[Row, Row]]:
    """Label of a run -> the second and the first chosen model, for the runs that have the column of both."""
    pairs = {}
    for run in ends_of_training(study):
        led = lineage(study, rows, run)
        one, other = first(run, led), second(run, led)
        if one and other and None not in (one[column], other[column]):
            pairs[study.label_of(run)] = (other, one)
    return pairs
