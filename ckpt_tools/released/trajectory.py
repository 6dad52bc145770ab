"""Revisions of a released model, of the hub or of a local directory, in the order of training."""

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from base.aligned import aligned
from base.errors import UserError, explain_validation
from base.names import take_one_of
from ckpt_tools.hf.directory import LINEAGE_JSON, read_download, read_lineage
from ckpt_tools.released.own_family import FamilyFile, family_file
from ckpt_tools.released.revisions import (
    TRAINING,
    Revision,
    find_revision,
    parse_revision,
    repo_of_directory,
    training_order,
    trajectory_of,
)

UNKNOWN = "unknown"
HUB_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
# Averages of a run: lawa5x500-step00012000, and once published stage1-step12000-tokens6B-lawa5x500.
AVERAGE = re.compile(r"(?P<exported>.+)-step\d{8,}|.+-tokens\d+[BMK]-(?P<published>.+)")
MOST_NAMED = 5  # revisions that are left out for one reason; of more the number is said


def revisions_of(source: str, family: str | None = None) -> list[Revision]:
    """Return the revisions of a repository of the hub or of a local directory, in training order.

    A line on stderr says which revisions are left out because their names do not follow the
    trajectory's naming.

    Args:
        source: OWNER/NAME, or a directory that holds one HF directory per revision: exports of a
            run, which their lineage.json describes, or revisions of a released model.
        family: repository whose naming and schedule the revisions have, or a FILE.toml that says
            both (`ckpt_tools.released.own_family`); None: told by `source`, by the files of earlier
            downloads, or by the directory's name, which is then OWNER--NAME or NAME.

    Raises:
        UserError: `source` is neither, its family is not known, or no name follows its naming.
    """
    own = family_file(family)
    if is_local(source):
        directory = Path(source)
        names = sorted(path.name for path in directory.glob("[!.]*") if path.is_dir())
        if own:
            return _of_own_family(source, directory.resolve().name, names, own)
        return _in_order(source, names, lambda name: _local_revision(directory / name, family))
    repo = family or source
    known = None if own else trajectory_of(repo)  # before the hub is asked
    from ckpt_tools.released.hub import hub

    with hub(source) as api:
        branches = [branch.name for branch in api.list_repo_refs(source).branches]
    if own:
        return _of_own_family(source, source, branches, own)
    return _in_order(source, branches, lambda name: parse_revision(repo, name, known))


def _of_own_family(source: str, repo: str, names: Sequence[str], own: FamilyFile) -> list[Revision]:
    """Return the revisions of a family of the user's own, in its order and with its tables."""
    trajectory = own.trajectory(repo)
    templates = ", ".join(stage.template for stage in trajectory.stages)

    def read(name: str) -> Revision:
        found = find_revision(repo, name, trajectory)
        if found is None:
            raise UserError(
                f"{name}: no stage of {own.path} names revisions so, they have {templates}; correct"
                " the file, or leave the revision out"
            )
        return found

    revisions = _in_order(
        source, names, read, lambda revision: training_order(revision, trajectory)
    )
    return own.with_tables(revisions)


def is_local(source: str) -> bool:
    """Return whether `source` is a directory; UserError if it is not a repository either."""
    if Path(source).is_dir():
        return True
    if not HUB_REPO.fullmatch(source):
        raise UserError(
            f"{source} is not a directory; give one, or a repository of the hub as OWNER/NAME"
        )
    return False


def _in_order(
    source: str,
    names: Sequence[str],
    read: Callable[[str], Revision],
    order: Callable[[Revision], tuple[Any, ...]] | None = None,
) -> list[Revision]:
    revisions, refused = [], dict[str, UserError]()
    for name in names:
        try:
            revisions.append(read(name))
        except UserError as error:
            refused[name] = error
    # Where no name fits, the source is wrong: the first reason stands for all.
    if not revisions and refused:
        raise next(iter(refused.values()))
    if not revisions:
        raise UserError(f"{source} holds no revisions; give a directory of HF directories")

    # what they are refused for, less the name before it and the advice after it
    reasons = {
        name: str(error).partition(name)[2].lstrip(": ").partition(";")[0]
        for name, error in refused.items()
    }
    say_left_out(reasons, len(names))
    return sorted(revisions, key=order or _order)


def say_left_out(reasons: Mapping[str, str], total: int) -> None:
    """Print a line on stderr about revisions that are left out, by name, of so many."""
    if not reasons:
        return
    parts = []
    for reason in dict.fromkeys(reasons.values()):
        names = [name for name, stated in reasons.items() if stated == reason]
        more = len(names) - MOST_NAMED
        listed = ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        parts.append(f"{listed} ({reason})")
    print(f"left out {len(reasons)} of {total} revisions: {'; '.join(parts)}", file=sys.stderr)


def _order(revision: Revision) -> tuple[Any, ...]:
    """Return a sort key: the order of training, and averages of a run after its own weights."""
    try:
        stage, ingredient, step = training_order(revision)
        return revision.repo, stage, "", ingredient, step
    except UserError:  # an export
        return revision.repo, int(revision.stage != TRAINING), revision.stage, 0, revision.step or 0


def _local_revision(path: Path, family: str | None) -> Revision:
    # A family that was given decides, whatever the files say.
    lineage = None if family else read_lineage(path)
    if lineage:
        return _exported(path, lineage[0])
    repo = _repo_of(path, family)
    if repo is None:
        raise UserError(
            f"{path} does not say which trajectory it belongs to; name its family (--family, in a"
            " study --set family=...), such as allenai/OLMo-2-1124-7B or a FILE.toml of yours"
        )
    return parse_revision(repo, path.name)


def _repo_of(path: Path, family: str | None) -> str | None:
    """Return the repository that a directory of a revision belongs to; None if nothing says so."""
    record = None if family else read_download(path)
    by_name = repo_of_directory(path.resolve().parent.name)
    return family or (record.repo if record else by_name)


def origin_of(path: Path, family: str | None = None) -> str:
    """Return what a directory of a revision belongs to: a run, a repository, or its directory."""
    if family_file(family):
        return path.resolve().parent.name
    lineage = None if family else read_lineage(path)
    run = lineage[0].get("run") if lineage else _repo_of(path, family)
    return run or path.resolve().parent.name


def _exported(path: Path, lineage: dict[str, Any]) -> Revision:
    """Return an export of a run, or an average of exports, by its lineage.json."""
    averaged = lineage.get("kind") == "average" or lineage.get("average")
    average = AVERAGE.fullmatch(path.name) if averaged else None
    step = lineage.get("step")
    try:
        return Revision(
            repo=lineage.get("run") or path.resolve().parent.name,
            revision=path.name,
            # The group that matched: the name as exported, or as published.
            stage=average[average.lastgroup or 0] if average else TRAINING,
            average_of=(TRAINING,) if averaged else (),
            # An average of several runs has no step; it stands at that of its newest ingredient.
            step=max(lineage.get("steps") or [], default=None) if step is None else step,
            tokens=lineage.get("tokens"),
            learning_rate=lineage.get("learning_rate"),
            schedule="of its run.json",
        )
    except ValidationError as error:
        raise explain_validation(str(path / LINEAGE_JSON), error) from None


def choose(
    revisions: list[Revision], *, every: int | None = None, stage: str | None = None
) -> list[Revision]:
    """Return, of each stage and ingredient, the first, every `every`-th after it, and the last.

    With `stage`, of that stage alone.

    Raises:
        UserError: there is no such stage.
    """
    stages = list(dict.fromkeys(revision.stage for revision in revisions))
    if stage is not None and stage not in stages:
        raise UserError(f"there is no stage '{stage}'; {take_one_of(stage, stages)}")
    selection: list[Revision] = []
    for (_, name, _), group in groupby(
        revisions, key=lambda revision: (revision.repo, revision.stage, revision.ingredient)
    ):
        if stage in (None, name):
            members = list(group)
            selection += [
                revision
                for index, revision in enumerate(members)
                if index % (every or 1) == 0 or revision is members[-1]
            ]
    return selection


def show(revisions: list[Revision]) -> None:
    """Print a line per revision: stage, step, tokens, learning rate; then all sources."""
    rows = [("revision", "stage", "step", "tokens", "learning rate", "schedule")]
    rows += [
        (
            revision.revision,
            revision.stage
            if revision.ingredient is None
            else f"{revision.stage} {revision.ingredient}",
            UNKNOWN if revision.step is None else f"{revision.step:,}",
            UNKNOWN if revision.tokens is None else f"{revision.tokens:,}",
            UNKNOWN if revision.learning_rate is None else f"{revision.learning_rate:.3e}",
            revision.course,
        )
        for revision in revisions
    ]
    print("\n".join(aligned(rows)))
    for source in sources_of(revisions):
        print(source)


def sources_of(revisions: Iterable[Revision]) -> list[str]:
    """Return the sources of what is known of revisions, each once."""
    sources = (
        f"{each.course if each.average_of else each.schedule or 'revisions'}: {each.source}"
        for each in revisions
        if each.source
    )
    return list(dict.fromkeys(sources))
