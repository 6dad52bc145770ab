"""Averages along a released trajectory: LAWA windows, and soups of named revisions.

As in the authors' code (aldakata/TrainingDynamicsQuantizationRobustness, weight_averaging.py): the
uniform mean of the last L revisions of those that are listed to be measured. There they are of one
stage, or of all ingredients in turn, which a soup names here.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from base.errors import UserError
from base.frozen import NAME_PATTERN
from base.names import take_one_of
from ckpt_tools.released.revisions import Revision
from study.released import (
    ReleasedRevision,
    ReleasedRun,
    ReleasedSoup,
    describe_lawa,
    lawa_name,
)

WINDOW = re.compile(r"lawa([1-9][0-9]{0,5})")


class Asked(NamedTuple):
    """Lengths of windows, and the revisions of soups by name, that `averages` asks for."""

    windows: tuple[int, ...]
    soups: dict[str, tuple[str, ...]]


def with_averages(
    runs: Sequence[ReleasedRun], listed: Mapping[str, Sequence[Revision]], text: str
) -> tuple[ReleasedRun, ...]:
    """Return the stages with their averages; a line on stderr names those too short for a window.

    Args:
        runs: the stages, with the revisions that are measured.
        listed: all revisions of each source in the order of training. Soups take in any of them.
        text: such as lawa5,mine:step100:step200.

    Raises:
        UserError: the text is something else, no stage is as long as a window, or a soup names a
            revision that there is not, or one of a stage that is left out.
    """
    asked = averages_of(text)
    windows = {window: _stages_with(window, runs) for window in asked.windows}

    soups: dict[str, list[ReleasedSoup]] = {run.name: [] for run in runs}
    fetched: dict[str, dict[str, ReleasedRevision]] = {run.name: {} for run in runs}
    measured = {(run.name, each.name) for run in runs for each in run.revisions}
    stages = _stages_of(runs, listed)
    for name, revisions in asked.soups.items():
        members = _members(name, revisions, listed)
        for source, each in members:
            if (source, each.repo, each.line) not in stages:
                raise UserError(
                    f"averages={name}:... takes in {each.revision} of {each.line}, a stage that is"
                    " not measured; leave stage out"
                )
        placed = [(stages[source, each.repo, each.line], each) for source, each in members]
        paths = tuple(f"{run}/{each.revision}" for run, each in placed)
        soups[placed[-1][0]].append(ReleasedSoup(name=name, members=paths))
        for run, each in placed:
            if (run, each.revision) not in measured:
                fetched[run][each.revision] = ReleasedRevision.of(each)

    return tuple(
        ReleasedRun(
            **dict(run)
            | {
                "windows": tuple(window for window, those in windows.items() if run.name in those),
                "soups": tuple(soups[run.name]),
                "ingredients": tuple(fetched[run.name].values()),
            }
        )
        for run in runs
    )


def _stages_of(
    runs: Sequence[ReleasedRun], listed: Mapping[str, Sequence[Revision]]
) -> dict[tuple[str, str, str], str]:
    """Return the names of the runs by source, repository and line of their revisions."""
    names = {(run.source, each.name): run.name for run in runs for each in run.revisions}
    return {
        (source, each.repo, each.line): names[source, each.revision]
        for source, revisions in listed.items()
        for each in revisions
        if (source, each.revision) in names
    }


def averages_of(text: str) -> Asked:
    """Return what the text of `averages` asks for; UserError where it is something else.

    >>> averages_of("lawa5,mine:step100:step200")
    Asked(windows=(5,), soups={'mine': ('step100', 'step200')})
    """
    windows: list[int] = []
    soups: dict[str, tuple[str, ...]] = {}
    for part in text.split(","):
        name, *revisions = part.split(":")
        window = WINDOW.fullmatch(name)
        if name in soups or (window and int(window[1]) in windows):
            raise UserError(f"--set averages names {name} twice; name each average once")
        if window and not revisions and int(window[1]) > 1:
            windows.append(int(window[1]))
        elif not window and len(revisions) > 1 and re.fullmatch(NAME_PATTERN, name):
            soups[name] = tuple(revisions)
        else:
            raise UserError(
                f"--set averages: '{part:.80}' is no average; give such as lawa5, or"
                " NAME:REVISION:REVISION with two revisions or more"
            )
    return Asked(tuple(windows), soups)


def described(text: str) -> str:
    """Return what `averages` asks for as the end of a description."""
    asked = averages_of(text)
    words = [describe_lawa(window) for window in asked.windows]
    words += [f"{name}, a soup of {len(each)} revisions" for name, each in asked.soups.items()]
    return "; ".join(("", *words))


def _stages_with(window: int, runs: Sequence[ReleasedRun]) -> list[str]:
    """Return the stages that have so many measured revisions; UserError where none has."""
    trained = [run for run in runs if not run.average_of]
    long = [run.name for run in trained if len(run.revisions) >= window]
    if not long:
        most = max((len(run.revisions) for run in trained), default=0)
        raise UserError(
            f"{lawa_name(window)} takes in {window} consecutive revisions of a stage, no stage has"
            f" over {most}; give a smaller window, or a smaller every"
        )
    short = [f"{run.name} ({len(run.revisions)})" for run in trained if run.name not in long]
    if short:
        words = f"{lawa_name(window)} leaves out stages of fewer revisions: {', '.join(short)}"
        print(words, file=sys.stderr)
    return long


def _members(
    name: str, revisions: Sequence[str], listed: Mapping[str, Sequence[Revision]]
) -> list[tuple[str, Revision]]:
    """Return the revisions of a soup in the order of training, each with its source.

    UserError where one is in no source, or in several.
    """
    known = [(source, each) for source, those in listed.items() for each in those]
    counts = Counter(each.revision for _, each in known)
    for revision in revisions:
        if counts[revision] != 1:
            what = "no revision of the source" if not counts[revision] else "in several sources"
            action = take_one_of(revision, counts) if not counts[revision] else "give one source"
            raise UserError(f"averages={name}:... takes in {revision}, which is {what}; {action}")
    if len(set(revisions)) != len(revisions):
        raise UserError(f"averages={name}:... takes in a revision twice; name each once")
    # By tokens over all stages; sorting leaves those of equal tokens in the order of training.
    return sorted(
        (each for each in known if each[1].revision in revisions),
        key=lambda each: math.inf if each[1].tokens is None else each[1].tokens,
    )
