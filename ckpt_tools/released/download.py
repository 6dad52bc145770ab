"""Download of revisions of a trajectory, from the hub or from a local directory of revisions."""

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from base.errors import UserError
from base.files import committed_directory, record_file, sha256_of, write_json
from base.frozen import NAME_PATTERN
from base.progress import Progress
from ckpt_tools.hf.directory import read_lineage
from ckpt_tools.released.download_record import (
    DOWNLOAD_JSON,
    HUB_STATE,
    DownloadRecord,
    is_wanted,
    read_download,
)
from ckpt_tools.released.trajectory import choose, is_local, revisions_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo


def download(
    place: str,
    into: Path,
    *,
    every: int | None = None,
    stage: str | None = None,
    family: str | None = None,
    revisions: list[str] | None = None,
) -> None:
    """Write INTO/REVISION for every chosen revision; its download.json comes last.

    Fetched are safetensors, configuration and tokenizer; files that can run code (`*.bin`, `*.py`)
    never are. A complete revision is left unchanged, an incomplete one is continued.

    Args:
        place: OWNER/NAME on the hub, or a local directory of revisions.
        into: directory that takes one per revision.
        every: see `trajectory.choose`.
        stage: see `trajectory.choose`.
        family: see `trajectory.revisions_of`.
        revisions: to fetch instead of those of the trajectory; on the hub of any repository.

    Raises:
        UserError: a revision has no safetensors, something else is in its place, the disk is too
            small, a file is not what the hub or the source says, or the hub is not reached. What
            was complete before stays.
    """
    origins = _origins(place, every, stage, family, revisions or [])
    for name in origins:
        if not re.fullmatch(NAME_PATTERN, name):
            raise UserError(
                f"'{name}' cannot name a directory; give a revision without slash that begins with"
                " a letter"
            )
    local = is_local(place)
    missing = [
        name
        for name, repo in origins.items()
        if not _is_current(into / name, repo, Path(place) / name if local else None)
    ]
    if missing and local:
        _copy_all({into / name: (Path(place) / name, origins[name]) for name in missing})
    elif missing:
        _fetch_all(place, missing, into)
    print(f"{len(origins)} revisions in {into}, {len(missing)} of them fetched now")


def _origins(
    place: str, every: int | None, stage: str | None, family: str | None, names: list[str]
) -> dict[str, str]:
    """Return the revisions to fetch, each with the repository that it belongs to."""
    if names and (every is not None or stage is not None):
        raise UserError(
            "--revision names what to fetch, --every and --stage choose; give one or the other"
        )
    local = is_local(place)
    if names and not local:
        return dict.fromkeys(names, place)
    revisions = choose(revisions_of(place, family), every=every, stage=stage)
    table = {one.revision: one.repo if local else place for one in revisions}
    for name in names:
        if name not in table:
            raise UserError(f"{place} holds no revision '{name}'; list them with --dry-run")
    return {name: table[name] for name in names} or table


def _is_current(target: Path, repo: str, source: Path | None) -> bool:
    """Return whether `target` is the complete revision, as its local source is now.

    Raises:
        UserError: it is something else.
    """
    if not target.exists():
        return False
    record = read_download(target) if target.is_dir() else None
    if record is None:
        if target.is_dir() and (target / HUB_STATE).is_dir():
            return False  # fetched in part
        raise UserError(f"{target} exists and is no download; give another directory or remove it")
    if (record.repo, record.revision) != (repo, target.name):
        raise UserError(
            f"{target} is {record.revision} of {record.repo}, not of {repo}; give another directory"
        )
    if source is not None and _has_changed(source, record):
        return False
    wrong = [name for name, file in record.files.items() if _size(target / name) != file.bytes]
    if wrong:
        print(f"{target / wrong[0]} is missing or truncated; fetching it again", file=sys.stderr)
    return not wrong


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _has_changed(source: Path, record: DownloadRecord) -> bool:
    """Return whether a source differs from its copy in a size, or in the hash of a JSON."""
    sizes = {name: _size(source / name) for name in _wanted_files(source)}
    return sizes != {name: file.bytes for name, file in record.files.items()} or any(
        sha256_of(source / name) != file.sha256
        for name, file in record.files.items()
        if name.endswith(".json")
    )


def _check_disk(directory: Path, needed: int) -> None:
    """Raise UserError unless `needed` bytes are free where `directory` is or will be."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(
            f"{needed / 1e9:,.1f} GB are to be written, but {directory} has {free / 1e9:,.1f} GB"
            " left; free space, choose fewer revisions with --every, or give another directory"
        )


def _seal(directory: Path, record: DownloadRecord) -> None:
    """Write download.json, after a check that the index names no file that is missing."""
    from ckpt_tools.formats.hf_weights import weight_files

    weight_files(directory)
    write_json(directory / DOWNLOAD_JSON, record.model_dump(mode="json"))


def _fetch_all(repo: str, revisions: list[str], into: Path) -> None:
    """Fetch revisions that are not complete; all of them are checked before the first byte."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from ckpt_tools.released.hub import hub

    with hub(repo) as api:
        plans = {name: _plan(api, repo, name) for name in revisions}
        sizes = {
            into / name / file: size
            for name, plan in plans.items()
            for file, (size, _) in _wanted(plan).items()
        }
        _check_disk(into, sum(size for path, size in sizes.items() if _size(path) != size))
        if not sys.stderr.isatty():
            disable_progress_bars()
        for number, (name, plan) in enumerate(plans.items(), 1):
            print(f"fetching {name} ({number} of {len(plans)})", file=sys.stderr, flush=True)
            _fetch(api, repo, plan, into / name)


def _plan(api: "HfApi", repo: str, revision: str) -> "ModelInfo":
    info = api.model_info(repo, revision=revision, files_metadata=True)
    if not any(name.endswith(".safetensors") for name in _wanted(info)):
        raise UserError(
            f"{repo} has no safetensors at {revision}; leave it out, pickled weights are not opened"
        )
    return info


def _wanted(plan: "ModelInfo") -> dict[str, tuple[int, str | None]]:
    """Return size and, of large files, SHA-256 of what belongs to a model, by file name."""
    return {
        file.rfilename: (file.size or 0, file.lfs.sha256 if file.lfs else None)
        for file in plan.siblings or []
        if is_wanted(file.rfilename)
    }


def _fetch(api: "HfApi", repo: str, plan: "ModelInfo", target: Path) -> None:
    """Fetch one revision; huggingface_hub continues what an earlier attempt left there."""
    wanted = _wanted(plan)
    (target / HUB_STATE).mkdir(parents=True, exist_ok=True)  # says that it is ours and incomplete
    (target / DOWNLOAD_JSON).unlink(missing_ok=True)
    for name, (size, _) in wanted.items():
        if _size(target / name) != size:
            (target / name).unlink(missing_ok=True)
    api.snapshot_download(repo, revision=plan.sha, local_dir=target, allow_patterns=list(wanted))
    files = {}
    for name, (size, sha256) in sorted(wanted.items()):
        files[name] = record_file(target / name)
        if files[name].bytes != size or files[name].sha256 != (sha256 or files[name].sha256):
            (target / name).unlink()
            raise UserError(
                f"{name} of {repo} at {target.name} came with other bytes than the hub says; run"
                " again"
            )
    _seal(target, DownloadRecord(repo=repo, revision=target.name, commit=plan.sha, files=files))
    shutil.rmtree(target / HUB_STATE)


def _wanted_files(source: Path) -> list[str]:
    paths = sorted(path for path in source.rglob("*") if path.is_file())
    wanted = [name for path in paths if is_wanted(name := path.relative_to(source).as_posix())]
    if not any(name.endswith(".safetensors") for name in wanted):
        raise UserError(
            f"{source} holds no safetensors; give HF directories that do, others are not opened"
        )
    return wanted


def _copy_all(copies: dict[Path, tuple[Path, str]]) -> None:
    """Copy (source, its repository) to each target."""
    sizes = {
        target: sum((source / name).stat().st_size for name in _wanted_files(source))
        for target, (source, _) in copies.items()
    }
    _check_disk(next(iter(copies)).parent, sum(sizes.values()))
    with Progress("copy", total=len(copies)) as progress:
        for target, (source, repo) in copies.items():
            _copy(source, target, repo)
            progress.advance(GB=sizes[target] / 1e9)


def _copy(source: Path, target: Path, repo: str) -> None:
    known, lineage = read_download(source), read_lineage(source)
    vouched = {**(lineage[1] if lineage else {}), **(known.files if known else {})}
    with committed_directory(target) as aside:
        files = {}
        for name in _wanted_files(source):
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, aside / name)
            files[name] = record_file(aside / name)
            if vouched.get(name, files[name]) != files[name]:
                raise UserError(f"{source / name} was changed after it was written; restore it")
        commit = known.commit if known else None
        _seal(aside, DownloadRecord(repo=repo, revision=target.name, commit=commit, files=files))
