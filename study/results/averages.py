"""Averages of weights beside the weights themselves, and beside annealed weights.

Kept in training (LAWA windows, EMAs), of consecutive released revisions (LAWA), and soups of
exported checkpoints or released revisions, uniform or by an emulated decay.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from quant_eval.specs import parse_spec
from study.axes import AnyRun
from study.definition import Study
from study.released import ReleasedRun, describe_lawa, lawa_name
from study.results.collect import phase_of
from study.results.summary import Rows, in_order
from study.results.table import Row
from train.run.config import RunConfig
from train.run.optimization import Ema, Lawa

LAWA, SOUP, DECAY = "LAWA", "soup", "decay-equivalent average"


def kept_averages(study: Study) -> list[Lawa | Ema]:
    """Return the averages that the runs keep in training, each once."""
    return list(dict.fromkeys(average for run in study.trained for average in run.averages))


class Averaging(NamedTuple):
    """One way of averaging: its name in the table, its kind, and in words.

    Attributes:
        kind: LAWA, EMA, soup, or of a soup by an emulated decay: decay-equivalent average.
    """

    name: str
    kind: str
    words: str

    @property
    def is_soup(self) -> bool:
        """Return whether it is made of exports, at the last of them alone."""
        return self.kind in (SOUP, DECAY)

    def label(self, others: Sequence["Averaging"]) -> str:
        """Return 'LAWA', or the whole name where `others` holds a second of its kind."""
        # Two averages of a kind differ in their lengths, which the whole name has.
        alone = sum(other.kind == self.kind for other in others) == 1
        return self.kind if alone else self.name


def averagings_of(study: Study) -> list[Averaging]:
    """Return how weights are averaged in a study, each once and soups last."""
    released = [run for run in study.runs if isinstance(run, ReleasedRun)]
    windows = dict.fromkeys(window for run in released for window in run.windows)
    return [
        *(
            Averaging(kept.name, kept.kind.upper(), kept.describe())
            for kept in kept_averages(study)
        ),
        *(Averaging(lawa_name(window), LAWA, describe_lawa(window)) for window in windows),
        *(
            Averaging(soup.name, DECAY if soup.decay else SOUP, soup.describe())
            for soup in study.soups
        ),
        *(Averaging(soup.name, SOUP, soup.describe()) for run in released for soup in run.soups),
    ]


def lowest_spec(study: Study) -> str:
    """Return the spec of the fewest bits: there quantization costs most."""
    return min(study.quantization.specs, key=lambda spec: parse_spec(spec).bits)


def compared_models(study: Study, rows: Rows) -> Iterator[tuple[str, str, Row]]:
    """Yield weights and averages at the end of each phase and of each soup, run by run.

    A model is the label of its run, its own name in words, and its row.
    """
    averages = averagings_of(study)
    titles = {average.name: average.words for average in averages}
    soups = {average.name for average in averages if average.is_soup}
    for run in in_order(study):
        of_run = [row for row in rows if row["run"] == run.name]
        averaged = [row for row in of_run if row["average"]]
        # Rows are by rising step, so the last one of a phase stays in the dict.
        last_of_phase = {row["phase"]: row["step"] for row in averaged}
        of_soups = {row["step"] for row in averaged if row["average"] in soups}
        steps = {*last_of_phase.values(), *of_soups}
        for row in of_run:
            if row["step"] in steps:
                title = titles[row["average"]] if row["average"] else _weights(run, row)
                yield study.label_of(run), title, row


def _weights(run: AnyRun, row: Row) -> str:
    phase = row["phase"]
    if phase == "anneal":
        phase = "annealed" if row["step"] == run.total_steps else "in the anneal"
    elif isinstance(run, RunConfig) and run.schedule.anneal:
        phase = "before the anneal"
    # Of some stages of released models no source states a step.
    return phase if row["step"] is None else f"step {row['step']}, {phase}"


class Made(NamedTuple):
    """The last model of an average, in a phase, at a step, or in place of an anneal.

    Attributes:
        in_place: it is of the run that an anneal leaves, at the step where the anneal ends.
    """

    name: str
    phase: str | None = None
    step: int | None = None
    in_place: bool = False

    def end_of(self, study: Study, run: AnyRun) -> tuple[str, int] | None:
        """Return run and step of it; None where the study has none.

        It is of this run, its parent or, at a step, the control: trained as long, without anneal.
        """
        if isinstance(run, ReleasedRun):
            return None
        if self.in_place:
            return self._in_place_of(study, run)
        path = [(run, run.total_steps)]
        if run.branch_from:
            path.append((study.parent_of(run), run.branch_from.step))
        control = study.control_of(run)
        if control and self.step:
            path.append((control, run.total_steps))
        for trained, last in path:
            # The last one that fits; a branch looks in its parent up to where it left it.
            for model in reversed(study.models_of(trained)):
                fits = (
                    model.average == self.name
                    and model.step <= last
                    and self.phase in (None, phase_of(trained, model.step))
                    and self.step in (None, model.step)
                )
                if fits:
                    return trained.name, model.step
        return None

    def _in_place_of(self, study: Study, run: RunConfig) -> tuple[str, int] | None:
        control = study.control_of(run)
        # A control that branches off itself is there to be compared, and no plan without anneals.
        if control is None or not run.branch_from or study.parent_of(run) != control:
            return None
        made = {(model.average, model.step) for model in study.models_of(control)}
        end = control.name, run.total_steps
        return end if (self.name, run.total_steps) in made else None


def against_annealed(study: Study) -> dict[str, Made]:
    """Return the averages to compare with the annealed weights by title: kept ones, and soups.

    Those that a run with an anneal has.
    """
    before = {
        f"{average.describe()}, before the anneal": Made(average.name, phase="stable")
        for average in kept_averages(study)
    }
    soups = {soup.describe(): Made(soup.name, step=soup.steps[-1]) for soup in study.soups}
    in_place = {
        f"{average.describe()}, in place of the anneal": Made(average.name, in_place=True)
        for average in kept_averages(study)
    }
    anneals = [run for run in study.trained if run.schedule.anneal]
    return {
        title: made
        for title, made in (before | soups | in_place).items()
        if any(made.end_of(study, run) for run in anneals)
    }
