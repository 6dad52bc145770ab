"""The parts of a study that are shown by themselves: its experiments, or else the whole."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from study.definition import Study
from study.experiments import Experiment
from study.results.table import Row


class ShownPart(NamedTuple):
    """A study of some of the runs, with their rows; the experiment is None for the whole."""

    experiment: Experiment | None
    study: Study
    rows: Sequence[Row]


def parts_of(study: Study, rows: Sequence[Row]) -> Iterator[ShownPart]:
    """Yield the parts of a study and of its table, in order."""
    if not study.experiments:
        yield ShownPart(None, study, rows)
    for experiment in study.experiments:
        part = study.part(experiment)
        names = {run.name for run in part.runs}
        yield ShownPart(experiment, part, [row for row in rows if row["run"] in names])
