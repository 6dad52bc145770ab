"""The ends of training in a few numbers: one summary per run, and the rows that led to it."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from base.grouping import grouped
from study.axes import AnyRun
from study.definition import Study
from study.released import ReleasedRun, is_after_pretraining, stage_before
from study.results.table import Row, trained
from train.run.config import RunConfig

# Shares of the largest learning rate: at least, and at most. A near-constant cosine is at 0.984 at
# the end of the controls of the OLMo2-7B ablation.
HIGH, DECAYED = 0.98, 0.5
Rows = Sequence[Row]


@dataclass(frozen=True)
class RunSummary:
    """One run that training was meant to end with.

    Attributes:
        label: its name in legends.
        run: its configuration, or the released model's stage.
        anneals: the learning rate decays at its end.
        first: row of the last checkpoint before the decay, of its parent for a branch; None where
            there is none.
        last: row of the last checkpoint of the run.
        group: label of the runs that are the same but for their seed.
        control: row of equal tokens, trained without the anneal; None where there is none.
    """

    label: str
    run: AnyRun
    anneals: bool
    first: Row | None
    last: Row | None
    group: str
    control: Row | None

    @property
    def seed(self) -> int | None:
        """The seed of the training; None for a released model, which is one training."""
        return self.run.seed if isinstance(self.run, RunConfig) else None


def in_order(study: Study) -> list[AnyRun]:
    """Return the runs by their number on the axis of the study, those without one first."""

    def rank(run: AnyRun) -> float:
        if study.varied and study.varied.has_numbers:
            return float(study.varied.values.get(run.name, float("-inf")))
        return 0.0

    return sorted(study.runs, key=rank)


def lineage(study: Study, rows: Rows, run: AnyRun) -> Rows:
    """Return all rows that led to the end of a run, in the order of training.

    They begin with those of the run that a branch leaves, or of the stage before a stage.
    """
    of_run = [row for row in rows if row["run"] == run.name]
    if isinstance(run, ReleasedRun):
        before = stage_before(study.runs, run)
        return [*(lineage(study, rows, before) if before else ()), *of_run]
    if run.branch_from is None:
        return of_run
    step = run.branch_from.step
    return [
        row for row in lineage(study, rows, study.parent_of(run)) if row["step"] <= step
    ] + of_run


def at_high_rate(rows: Rows) -> Rows:
    """Return the weights of one lineage after the warm-up at nearly the largest learning rate."""
    rates = [row["learning_rate"] or 0.0 for row in rows]
    # Near the peak, not at it: a slow cosine falls a little before it is left.
    high = HIGH * max(rates, default=0.0)
    kept = [row for row, rate in zip(rows, rates, strict=True) if 0 < rate >= high]
    return [row for row in trained(kept) if row["phase"] != "warmup"]


def ends_of_training(study: Study) -> list[AnyRun]:
    """Return the runs in order, less controls and those that others leave for their anneal.

    A stage of a released model that the next one continues is left out, too.
    """
    parents = {study.parent_of(run).name for run in study.trained if run.branch_from}
    continued = {
        run.parent for run in study.runs if isinstance(run, ReleasedRun) and not run.restarts
    }
    # A run that others branch from is an end, too, where it anneals itself.
    others = parents | continued | study.controls
    return [run for run in in_order(study) if run.name not in others or _anneals(run)]


def _anneals(run: AnyRun) -> bool:
    return isinstance(run, RunConfig) and run.schedule.anneal is not None


def summarize(study: Study, rows: Rows) -> list[RunSummary]:
    """Return one summary per run that is an end of training, in order."""
    summaries = []
    for run in ends_of_training(study):
        path = lineage(study, rows, run)
        end = (run.name, run.total_steps)
        last = next((row for row in trained(path) if (row["run"], row["step"]) == end), None)

        # the last checkpoint before the decay
        if isinstance(run, ReleasedRun):
            first, anneals = _before_decay(path, last) if pretrains(study, run) else (None, False)
        else:
            # Of a branch they are rows of its parent, which `lineage` puts first.
            stable = [row for row in trained(path) if row["phase"] == "stable"]
            anneals = _anneals(run)
            first = stable[-1] if stable and anneals else None

        # what the end is compared with
        control = study.control_of(run)
        equal = (control.name, run.total_steps) if control else None
        untouched = next((row for row in trained(rows) if (row["run"], row["step"]) == equal), None)
        label, group = study.label_of(run), study.group_of(run).label
        summaries.append(RunSummary(label, run, anneals, first, last, group, untouched))
    return summaries


def pretrains(study: Study, run: ReleasedRun) -> bool:
    """Return whether a stage is of pretraining: neither an average nor after it."""
    return not run.average_of and not is_after_pretraining(study.runs, run)


def _before_decay(rows: Rows, last: Row | None) -> tuple[Row | None, bool]:
    """Return the row before the decay of a released run, by its learning rates where known."""
    high = at_high_rate(rows)
    if last is None or last["learning_rate"] is None or not high:
        return None, False
    # An end that is not far below the high rate is no anneal.
    decays = last["learning_rate"] <= DECAYED * high[-1]["learning_rate"]
    return (high[-1] if decays else None), decays


def left_out(ends: Iterable[RunSummary], used: Set[str]) -> str:
    """Return in words the ends without a partner of their seed in a comparison; '' for none.

    Those are of a group of which it has other ends. `used` are the names of all runs that it has.
    """
    groups = grouped(ends, lambda end: end.group).values()
    tested = [
        end for group in groups if any(end.run.name in used for end in group) for end in group
    ]
    missing = [end.label for end in tested if end.run.name not in used]
    if not missing:
        return ""
    seeds = sorted({end.seed for end in tested if end.run.name in used and end.seed is not None})
    return (
        f"paired over seeds {enumeration(list(map(str, seeds)))}; left out, without a partner of"
        f" the same seed: {'; '.join(missing)}"
    )


def enumeration(labels: Sequence[str]) -> str:
    """Return 'a, b and c'."""
    return ", ".join(labels[:-1]) + f" and {labels[-1]}" if len(labels) > 1 else "".join(labels)
