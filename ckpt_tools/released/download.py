"""Fetching revisions of a trajectory, from the hub or from a local directory: one complete directory for each."""

import re
import shutil
import sys
from pathlib import Path

from ckpt_tools.hf_directory import read_lineage
from ckpt_tools.released.download_record import (
    DOWNLOAD_JSON,
    DownloadRecord,
    check_disk,
    first_wrong_size,
    is_wanted,
    read_download,
)
from ckpt_tools.released.revisions import Revision
from ckpt_tools.released.trajectory import choose, is_local, revisions_of
from train.command import Progress, UserError
from train.frozen import NAME_PATTERN
from train.run_directory import committed_directory, record_file, sha256_of, write_json


def download(
    place: str,
    into: Path,
    *,
    every: int | None = None,
    stage: str | None = None,
    family: str | None = None,
    revisions: list[str] | None = None,
    verify: bool = False,
) -> None:
    """Writes INTO/REVISION for every chosen revision: safetensors, configuration, tokenizer; download.json last.

    Files that can run code (`*.bin`, `*.py`) are never fetched. What is complete is left as it is. After a kill, files
    that were whole are not fetched again; huggingface_hub starts those anew of which a part was there.

    Args:
        place: OWNER/NAME on the hub, or a local directory of revisions.
        into: directory that takes one per revision.
        every: see `trajectory.choose`.
        stage: see `trajectory.choose`.
        family: see `trajectory.revisions_of`.
        revisions: to fetch instead of those of the trajectory; on the hub of any repository.
        verify: hash what is there already; otherwise sizes are compared.

    Raises:
        UserError: a revision has no safetensors, something else is in its place, the disk is too small, a file is not
            what the hub or the source says, or the hub is not reached. What was complete before stays.
    """
    if revisions and (every is not None or stage is not None):
        raise UserError("--revision names what to fetch, --every and --stage choose; give one or the other")
    local = is_local(place)
    if revisions and not local:
        origins = dict.fromkeys(revisions, place)
    else:
        table = choose(revisions_of(place, family), every=every, stage=stage)
        origins = {one.revision: one.repo if local else place for one in _picked(table, revisions or [], place)}
    for name in origins:
        if not re.fullmatch(NAME_PATTERN, name):
            raise UserError(
                f"'{name}' cannot name a directory; give a revision without slash that begins with a letter"
            )
    sources = {name: Path(place) / name if local else None for name in origins}
    missing = [name for name in origins if not _is_current(into / name, origins[name], sources[name], verify)]
    if missing and local:
        _copy_all({into / name: (Path(place) / name, origins[name]) for name in missing})
    elif missing:
        from ckpt_tools.released.download_hub import fetch_all

        fetch_all(place, missing, into)
    print(f"{len(origins)} revisions in {into}, {len(missing)} of them fetched now")


def _picked(table: list[Revision], names: list[str], place: str) -> list[Revision]:
    by_name = {one.revision: one for one in table}
    for name in names:
        if name not in by_name:
            raise UserError(f"{place} holds no revision '{name}'; list them with 'python -m ckpt_tools trajectory'")
    return [by_name[name] for name in names] or table


def _is_current(target: Path, repo: str, source: Path | None, verify: bool) -> bool:
    """Whether `target` is the complete revision, as far as a local source's as that is now.

    Raises:
        UserError: it is something else.
    """
    if not target.exists():
        return False
    record = read_download(target) if target.is_dir() else None
    if record is None:
        raise UserError(f"{target} exists and is no download; give another directory or remove it")
    if (record.repo, record.revision) != (repo, target.name):
        raise UserError(f"{target} is {record.revision} of {record.repo}, not of {repo}; give another directory")
    if source is not None and _has_changed(source, record):
        return False
    damage = first_wrong_size(target, record)
    if damage is None and verify:
        from ckpt_tools.formats.parallel import default_processes, first_damage_in_parallel

        damage = first_damage_in_parallel(target, record.files, default_processes())
    if damage:
        print(f"{damage}; fetching it again", file=sys.stderr)
    return damage is None


def _has_changed(source: Path, record: DownloadRecord) -> bool:
    """Whether a source is not what was copied: by all sizes, and by the hashes of what describes it."""
    sizes = {name: (source / name).stat().st_size for name in _wanted_files(source)}
    return sizes != {name: file.bytes for name, file in record.files.items()} or any(
        sha256_of(source / name) != file.sha256 for name, file in record.files.items() if name.endswith(".json")
    )


def _wanted_files(source: Path) -> list[str]:
    names = (path.relative_to(source).as_posix() for path in sorted(source.rglob("*")) if path.is_file())
    wanted = [name for name in names if is_wanted(name)]
    if not any(name.endswith(".safetensors") for name in wanted):
        raise UserError(f"{source} holds no safetensors; give HF directories that do, others are not opened")
    return wanted


def _copy_all(copies: dict[Path, tuple[Path, str]]) -> None:
    """Copies (source, its repository) to each target."""
    wanted = {target: _wanted_files(source) for target, (source, _) in copies.items()}
    sizes = {target: sum((copies[target][0] / name).stat().st_size for name in wanted[target]) for target in copies}
    check_disk(next(iter(copies)).parent, sum(sizes.values()))
    with Progress("copy", total=len(copies)) as progress:
        for target, (source, repo) in copies.items():
            _copy(source, target, repo, wanted[target])
            progress.advance(GB=sizes[target] / 1e9)


def _copy(source: Path, target: Path, repo: str, names: list[str]) -> None:
    from ckpt_tools.formats.hf_weights import weight_files

    known = read_download(source)
    lineage = read_lineage(source)
    vouched = {**(lineage[1] if lineage else {}), **(known.files if known else {})}
    with committed_directory(target) as aside:
        files = {}
        for name in names:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, aside / name)
            files[name] = record_file(aside / name)
            if vouched.get(name, files[name]) != files[name]:
                raise UserError(f"{source / name} was changed after it was written; restore it")
        weight_files(aside)
        record = DownloadRecord(repo=repo, revision=target.name, commit=known.commit if known else None, files=files)
        write_json(aside / DOWNLOAD_JSON, record.model_dump(mode="json"))
