"""The table of a trajectory: the revisions of a released model, or of a local directory, with their learning rates."""

import csv
import re
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from ckpt_tools.hf_directory import LINEAGE_JSON, read_lineage
from ckpt_tools.released.download_record import read_download
from ckpt_tools.released.registry import family_of, parse_revision, repo_of_directory
from ckpt_tools.released.revisions import Revision
from train.command import UserError, explain_validation
from train.run_directory import replaced_file

COLUMNS = ("repo", "revision", "stage", "ingredient", "step", "tokens", "learning_rate", "schedule")
UNKNOWN = "unknown"
TRAINING = "training"  # stage of a run's exports that are no averages
PLAIN_WIDTH = 200  # characters of a line that is not written to a terminal
HUB_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Averages of a run: lawa5x500-step00012000, and once published stage1-step12000-tokens6B-lawa5x500.
AVERAGE = re.compile(r"(?P<exported>.+)-step\d{8,}|.+-tokens\d+[BMK]-(?P<published>.+)")


def revisions_of(place: str, family: str | None = None) -> list[Revision]:
    """The revisions of a repository of the hub or of a local directory, in the order of training.

    A line on stderr names what is left out because its name says nothing that the trajectory's naming knows.

    Args:
        place: OWNER/NAME, or a directory that holds one HF directory per revision: exports of a run, which their
            lineage.json describes, or revisions of a released model.
        family: repository whose naming and schedule the revisions have; None: told by `place`, by the files of earlier
            downloads, or by the directory's name, which is then OWNER--NAME or NAME.

    Raises:
        UserError: `place` is neither, its family is not known, or no name is left.
    """
    if family is not None:
        family_of(family)
    if is_local(place):
        directory = Path(place)
        names = sorted(path.name for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))
        by_name = repo_of_directory(directory.resolve().name)
        return _in_order(place, names, lambda name: _local_revision(directory / name, family, by_name))
    repo = family or place
    family_of(repo)  # before the hub is asked
    from ckpt_tools.released.hub import hub

    with hub(place) as api:
        branches = [branch.name for branch in api.list_repo_refs(place).branches]
    return _in_order(place, branches, lambda name: parse_revision(repo, name))


def is_local(place: str) -> bool:
    """Whether `place` is a directory; UserError if it is no repository of the hub either."""
    if Path(place).is_dir():
        return True
    if not HUB_REPO.fullmatch(place):
        raise UserError(f"{place} is no directory; give one, or a repository of the hub as OWNER/NAME")
    return False


def _in_order(place: str, names: Iterable[str], read: Callable[[str], Revision]) -> list[Revision]:
    found, refused = [], []
    for name in names:
        try:
            found.append(read(name))
        except UserError as error:
            refused.append(error)
    if not found:
        raise refused[0] if refused else UserError(f"{place} holds no revisions; give a directory of HF directories")
    for reason in refused:
        print(f"left out: {reason}", file=sys.stderr)
    return sorted(found, key=_order)


def _order(revision: Revision) -> tuple[Any, ...]:
    """Weights as training left them come before averages of a run; everything else is in the order of training."""
    try:
        stage, ingredient, step = family_of(revision.repo).order(revision)
        return revision.repo, stage, "", ingredient, step
    except UserError:  # an export
        return revision.repo, int(revision.stage != TRAINING), revision.stage, 0, revision.step or 0


def _local_revision(path: Path, family: str | None, by_name: str | None) -> Revision:
    found = None if family else read_lineage(path)
    if found:
        return _exported(path, found[0])
    record = None if family else read_download(path)
    repo = family or (record.repo if record else by_name)
    if repo is None:
        raise UserError(f"{path} tells no trajectory that it belongs to; give --family, such as allenai/OLMo-2-1124-7B")
    return parse_revision(repo, path.name)


def _exported(path: Path, lineage: dict[str, Any]) -> Revision:
    """An export of a run, or an average of exports, by its lineage.json."""
    average = AVERAGE.fullmatch(path.name) if lineage.get("kind") == "average" or lineage.get("average") else None
    try:
        return Revision(
            repo=lineage.get("run") or path.resolve().parent.name,
            revision=path.name,
            stage=average[average.lastgroup or 0] if average else TRAINING,
            step=lineage["step"] if lineage.get("step") is not None else max(lineage.get("steps") or [], default=None),
            tokens=lineage.get("tokens"),
            learning_rate=lineage.get("learning_rate"),
            schedule="of its run.json",
        )
    except ValidationError as error:
        raise explain_validation(str(path / LINEAGE_JSON), error) from None


def choose(revisions: list[Revision], *, every: int | None = None, stage: str | None = None) -> list[Revision]:
    """Those of one stage, and of each stage and ingredient the first, every `every`-th behind it, and the last.

    Raises:
        UserError: there is no such stage.
    """
    stages = list(dict.fromkeys(one.stage for one in revisions))
    if stage is not None and stage not in stages:
        raise UserError(f"there is no stage '{stage}'; give one of {', '.join(stages)}")
    chosen: list[Revision] = []
    for (_, name, _), group in groupby(revisions, key=lambda one: (one.repo, one.stage, one.ingredient)):
        if stage in (None, name):
            members = list(group)
            chosen += [one for index, one in enumerate(members) if index % (every or 1) == 0 or one is members[-1]]
    return chosen


def save_table(path: Path, rows: list[Revision]) -> None:
    """Writes a CSV of `COLUMNS`, whole or not at all; what is unknown is empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as aside, aside.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(["" if value is None else value for value in _values(row)] for row in rows)


def _values(row: Revision) -> list[Any]:
    return [getattr(row, column) for column in COLUMNS]


def show(place: str, *, every: int | None, stage: str | None, family: str | None, out: Path | None) -> None:
    """Prints the table of a trajectory and saves it, by default as trajectory-OWNER--NAME.csv; see `revisions_of`."""
    rows = choose(revisions_of(place, family), every=every, stage=stage)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    table = Table(box=box.SIMPLE_HEAD)
    for heading in COLUMNS[1:]:
        numbers = heading in ("ingredient", "step", "tokens", "learning_rate")
        table.add_column(heading.replace("_", " "), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(_shown, COLUMNS[1:], _values(row)[1:]))
    console.print(f"{place}: {len(rows)} revisions")
    console.print(table)
    for source in dict.fromkeys(f"{row.schedule}: {row.source}" for row in rows if row.source):
        console.print(source, soft_wrap=True)
    name = Path(place).resolve().name if is_local(place) else place.replace("/", "--")
    path = out or Path(f"trajectory-{name}.csv")
    save_table(path, rows)
    console.print(f"saved to {path}", soft_wrap=True)


def _shown(column: str, value: Any) -> str:
    if value is None:
        return "" if column == "ingredient" else UNKNOWN
    if column == "learning_rate":
        return f"{value:.3e}" if value else "0"
    return f"{value:,}" if isinstance(value, int) else str(value)
