"""The kinds of processors that a study was trained and measured on, said where they are mixed."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from base.grouping import grouped
from base.processor import kind_of
from ckpt_tools.hf.results import read_content
from study.definition import Study
from study.results.summary import enumeration
from train.run.directory import RunDirectory
from train.run.history import history, surviving

MEANING = (
    "Processors of another kind round sums in another order, and training amplifies that as it does"
    " another seed: a difference between such runs may be no more than this, which only intervals"
    " over seeds hold. On a cluster `constraint` in the site file keeps a study on one kind."
)
AGAINST = (
    "runs on processors of different kinds, named above, are compared; what that adds to their"
    " difference is in no interval but one over seeds"
)


class StudyKinds(NamedTuple):
    """Kinds of processors in words, as far as they are recorded.

    Attributes:
        trained: by run, those whose updates are in its weights, in the order of the attempts.
        measured: by kind of measurement and run, how many results each has.
    """

    trained: dict[str, list[str]]
    measured: dict[str, dict[str, Counter[str]]]


def kinds_of_study(directory: Path, study: Study) -> StudyKinds:
    """Read the kinds from environment.json of every run and from every result."""
    trained: dict[str, list[str]] = {}
    for training in study.trained:
        works = history(RunDirectory(directory / training.name))
        kept = [work for work, count in zip(works, surviving(works), strict=True) if count]
        trained[training.name] = list(dict.fromkeys(kind for work in kept for kind in work.kinds))

    measured: dict[str, dict[str, Counter[str]]] = {}
    for run in study.runs:
        for model, measurements in study.measured(run).items():
            for kind, settings in measurements:
                for path in kind.results(settings, run.name, model):
                    of_run = measured.setdefault(kind.name, {}).setdefault(run.name, Counter())
                    of_run.update(_kinds_of_result(directory / path))
    return StudyKinds(trained, measured)


def _kinds_of_result(path: Path) -> list[str]:
    """Return the kind that a result was computed on; empty without one."""
    if not path.exists():
        return []
    kind = kind_of(read_content(path).get("environment") or {})
    return [kind] if kind else []


def mixed_in_words(kinds: StudyKinds, runs: Collection[str]) -> list[str]:
    """Return sentences on what was computed on several kinds among these runs; none for one kind.

    A training and a measurement may differ: no claim compares one with the other.
    """
    sentences = []
    trained = {run: of_run for run, of_run in kinds.trained.items() if run in runs and of_run}
    if len({kind for of_run in trained.values() for kind in of_run}) > 1:
        groups = grouped(trained, lambda run: enumeration(trained[run]))
        on = [f"{enumeration(names)} on {words}" for words, names in groups.items()]
        sentences.append(f"Trained on processors of different kinds: {'; '.join(on)}.")

    for measurement, by_run in kinds.measured.items():
        counts = {run: count for run, count in by_run.items() if run in runs}
        total = sum(counts.values(), Counter[str]())
        if len(total) > 1:
            on = [
                f"{number} results of {enumeration([run for run in counts if counts[run][kind]])}"
                f" on {kind}"
                for kind, number in total.most_common()
            ]
            sentences.append(
                f"Measured on processors of different kinds ({measurement}): {'; '.join(on)}."
            )
    return [*sentences, MEANING] if sentences else []
