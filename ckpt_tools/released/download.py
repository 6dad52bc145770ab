"""Download of revisions of a trajectory or a tokenizer, from the hub or from a local directory."""

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from base.errors import UserError
from base.files import (
    FileRecord,
    committed_directory,
    fsync_path,
    hash_file,
    record_file,
    record_files,
    write_sealed,
)
from base.frozen import NAME_PATTERN
from base.progress import Progress
from base.quantities import size_in_words
from base.reading import as_model, read_sealed
from ckpt_tools.formats.weight_files import PICKLE_INDEX, converted_name, pickles_of, weight_files
from ckpt_tools.hf.directory import (
    DOWNLOAD_JSON,
    HUB_STATE,
    TOKENIZER_FILES,
    VERIFICATION_PROBE,
    Conversion,
    DownloadRecord,
    copy_files,
    read_download,
    read_lineage,
)
from ckpt_tools.released.before import check_plans, check_revisions
from ckpt_tools.released.trajectory import choose, is_local, origin_of, revisions_of
from train.data.tokenizer import TOKENIZER_JSON, load_tokenizer
from train.run.directory import MODEL_INDEX

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

DATA_SUFFIXES = (".safetensors", ".json", ".jinja")
VOCABULARIES = ("tokenizer.model", "merges.txt", "vocab.txt")


def download(
    source: str,
    into: Path,
    *,
    every: int | None = None,
    stage: str | None = None,
    family: str | None = None,
    revisions: list[str] | None = None,
) -> None:
    """Write INTO/REVISION for every chosen revision; its download.json comes last.

    Fetched are safetensors, configuration and tokenizer, never code (`*.py`). Where weights are
    pickles only (`pytorch_model*.bin`), each is converted to safetensors and then removed, and
    nothing of it is run; in a local directory they stay as they are. A complete revision is left
    unchanged, an incomplete one is resumed.

    Args:
        source: OWNER/NAME on the hub, or a local directory of revisions.
        into: directory that takes one per revision.
        every: see `trajectory.choose`.
        stage: see `trajectory.choose`.
        family: see `trajectory.revisions_of`.
        revisions: to fetch instead of those of the trajectory; on the hub of any repository.

    Raises:
        UserError: a revision has no such weights, a pickle holds more than tensors, something else
            is in a revision's place, the disk is too small, a file differs from the hub's or the
            source's hash, or the hub is not reached.
            Revisions that were complete before stay.
    """
    origins = _origins(source, every, stage, family, revisions or [])
    for name in origins:
        if not re.fullmatch(NAME_PATTERN, name):
            raise UserError(
                f"'{name}' cannot name a directory; give a revision without slash that begins with"
                " a letter"
            )
    incomplete = [name for name, repo in origins.items() if not _is_complete(into / name, repo)]
    if incomplete and is_local(source):
        _copy_all(Path(source), {name: origins[name] for name in incomplete}, into)
    elif incomplete:
        _fetch_all(source, incomplete, into)
    print(f"{len(origins)} revisions in {into}, {len(incomplete)} of them fetched now")


def _origins(
    source: str, every: int | None, stage: str | None, family: str | None, names: list[str]
) -> dict[str, str]:
    """Return the revisions to fetch, each with the repository that it belongs to."""
    if names and (every is not None or stage is not None):
        raise UserError(
            "--revision names what to fetch, --every and --stage choose; give one or the other"
        )
    local = is_local(source)
    if names and local:
        return {name: _local_origin(Path(source) / name, family) for name in names}
    if names and family is not None:
        raise UserError(
            "--family tells how names are read, a --revision of the hub is fetched as it is named;"
            " leave out --family"
        )
    if names:
        return dict.fromkeys(names, source)
    revisions = choose(revisions_of(source, family), every=every, stage=stage)
    return {revision.revision: revision.repo if local else source for revision in revisions}


def _local_origin(path: Path, family: str | None) -> str:
    if not path.is_dir():
        raise UserError(f"{path.parent} holds no revision '{path.name}'; list them with --dry-run")
    return origin_of(path, family)


def _is_complete(target: Path, repo: str) -> bool:
    """Return whether `target` is the complete revision; UserError if it is something else."""
    record = read_download(target)
    if record is None:
        if target.exists() and not (target / HUB_STATE).is_dir():  # else fetched in part
            raise UserError(f"{target} exists and is not a download; give another directory")
        return False
    if (record.repo, record.revision) != (repo, target.name):
        raise UserError(
            f"{target} is {record.revision} of {record.repo}, not of {repo}; give another directory"
        )
    # By size alone: hashes would read every complete revision again at each call.
    wrong = [name for name, file in record.files.items() if _size(target / name) != file.bytes]
    if wrong:
        print(f"{target / wrong[0]} is missing or truncated; fetching it again", file=sys.stderr)
    return not wrong


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _is_wanted(name: str) -> bool:
    """Return whether a file is part of the model: data, never code, and what proves an export."""
    if "/" in name:
        return name == VERIFICATION_PROBE
    return name in VOCABULARIES or (name.endswith(DATA_SUFFIXES) and name != DOWNLOAD_JSON)


def _check_room(sizes: dict[str, dict[str, int]], into: Path, beside: int = 0) -> None:
    """Raise UserError unless the missing files of all revisions fit, with one `beside` them."""
    needed = beside + sum(
        size
        for revision, files in sizes.items()
        for name, size in files.items()
        if _size(into / revision / name) != size
    )
    # The nearest directory that exists is on the disk that takes the files.
    ancestor = next(path for path in (into, *into.absolute().parents) if path.exists())
    free = shutil.disk_usage(ancestor).free
    if needed > free:
        raise UserError(
            f"{size_in_words(needed)} are to be written, but {into} has {size_in_words(free)}"
            " left; free space, choose fewer revisions with --every, or give another directory"
        )


def _seal(directory: Path, record: DownloadRecord) -> None:
    """Write download.json, after a check that the index names no file that is missing."""
    weight_files(directory)
    write_sealed(directory / DOWNLOAD_JSON, record.model_dump(mode="json"))


def _fetch_all(repo: str, revisions: list[str], into: Path) -> None:
    """Fetch revisions that are not complete; all of them are checked before the first byte."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from ckpt_tools.released.hub import hub

    if not sys.stderr.isatty():
        disable_progress_bars()

    with hub(repo) as api:
        plans = {
            name: api.model_info(repo, revision=name, files_metadata=True) for name in revisions
        }
        check_plans(api, repo, plans)
        sizes = {name: _sizes(plan, into / name) for name, plan in plans.items()}
        # A pickle is removed before the next one is fetched.
        pickled = [file.size or 0 for plan in plans.values() for file in _pickles(plan).values()]
        _check_room(sizes, into, beside=max(pickled, default=0))
        for number, (name, plan) in enumerate(plans.items(), 1):
            print(f"fetching {name} ({number} of {len(plans)})", file=sys.stderr, flush=True)
            _fetch(api, repo, plan, into / name)


def _model_files(plan: "ModelInfo") -> "dict[str, RepoSibling]":
    """Return the files to fetch that are kept as they are."""
    wanted = {file.rfilename: file for file in plan.siblings or [] if _is_wanted(file.rfilename)}
    if _pickles(plan):
        wanted.pop(MODEL_INDEX, None)  # of files that are not there
    return wanted


def _pickles(plan: "ModelInfo") -> "dict[str, RepoSibling]":
    """Return the files to convert."""
    files = {file.rfilename: file for file in plan.siblings or []}
    return {name: files[name] for name in pickles_of(str(plan.id), files)}


def _sizes(plan: "ModelInfo", target: Path) -> dict[str, int]:
    """Return the bytes of each file that the revision will have."""
    sizes = {name: file.size or 0 for name, file in _model_files(plan).items()}
    # As large as the pickle, but for a few bytes of the header.
    return sizes | {
        converted_name(name): file.size or 0
        for name, file in _pickles(plan).items()
        if _conversion(target, file) is None
    }


def _fetch(api: "HfApi", repo: str, plan: "ModelInfo", target: Path) -> None:
    """Fetch one revision; huggingface_hub resumes an earlier attempt."""
    from ckpt_tools.released.pickles import write_index

    (target / HUB_STATE).mkdir(parents=True, exist_ok=True)  # marks it as ours and incomplete
    _keep_conversions(target)
    # From here until `_seal` the revision counts as incomplete, also if the process dies.
    (target / DOWNLOAD_JSON).unlink(missing_ok=True)

    files = _fetch_files(api, repo, plan, target, _model_files(plan))
    converted = {}
    for name, file in _pickles(plan).items():
        converted[converted_name(name)] = _fetch_converted(api, repo, plan, target, file)
    if converted:
        with _removed_if_refused(target):
            write_index(target, converted)
        files.pop(PICKLE_INDEX, None)
        made = [*converted, *([MODEL_INDEX] if (target / MODEL_INDEX).is_file() else [])]
        files |= {name: record_file(target / name, "sha256") for name in made}
    record = DownloadRecord(
        repo=repo,
        revision=target.name,
        commit=plan.sha,
        files=dict(sorted(files.items())),
        converted=converted,
    )
    _seal(target, record)
    # After the seal: until then it marks a directory that may be resumed.
    shutil.rmtree(target / HUB_STATE)


def _fetch_files(
    api: "HfApi",
    repo: str,
    plan: "ModelInfo",
    target: Path,
    expected: "dict[str, RepoSibling]",
) -> dict[str, FileRecord]:
    """Fetch files of a revision; UserError where one has another size or hash than the hub says."""
    # huggingface_hub may take a file of the same commit as it is, whatever its size.
    for name, file in expected.items():
        if _size(target / name) != file.size:
            (target / name).unlink(missing_ok=True)
    api.snapshot_download(repo, revision=plan.sha, local_dir=target, allow_patterns=list(expected))

    files = {}
    for name, file in sorted(expected.items()):
        files[name] = record_file(target / name, "sha256")
        # The hub gives the hash of large files alone.
        digest = f"sha256:{file.lfs.sha256}" if file.lfs else files[name].digest
        if files[name] != FileRecord(bytes=file.size or 0, digest=digest):
            # Removed, so that the next attempt fetches it again.
            (target / name).unlink()
            raise UserError(
                f"{name} of {repo} at {target.name} came with other bytes than the hub says; run"
                " again"
            )
    return files


def _fetch_converted(
    api: "HfApi", repo: str, plan: "ModelInfo", target: Path, file: "RepoSibling"
) -> Conversion:
    """Fetch one pickle and convert it, unless an earlier attempt did; then it is removed."""
    from ckpt_tools.released.pickles import convert

    name = file.rfilename
    conversion = _conversion(target, file)
    if conversion is None:
        record = _fetch_files(api, repo, plan, target, {name: file})[name]
        print(f"converting {name} of {target.name}", file=sys.stderr, flush=True)
        with _removed_if_refused(target):
            conversion = convert(target / name, record, target)
        write_sealed(_note(target, name), conversion.model_dump(mode="json"))
    (target / name).unlink(missing_ok=True)
    return conversion


def _conversion(target: Path, file: "RepoSibling") -> Conversion | None:
    """Return the conversion that an earlier attempt completed, of the bytes that the hub has."""
    note = _note(target, file.rfilename)
    if not note.is_file() or not (target / converted_name(file.rfilename)).is_file():
        return None
    conversion = as_model(Conversion, read_sealed(note, f"remove {target} and run again"), note)
    digest = f"sha256:{file.lfs.sha256}" if file.lfs else ""
    return conversion if conversion.record.digest == digest else None


def _note(target: Path, pickle: str) -> Path:
    return target / HUB_STATE / f"{pickle}.converted.json"


def _keep_conversions(target: Path) -> None:
    """Note the conversions of a damaged download whose files are there."""
    record = read_download(target)
    if record is None:
        return
    for name, conversion in record.converted.items():
        recorded = record.files.get(name)
        if recorded and _size(target / name) == recorded.bytes:
            write_sealed(_note(target, conversion.pickle), conversion.model_dump(mode="json"))


@contextmanager
def _removed_if_refused(target: Path) -> Iterator[None]:
    """Remove all of a revision whose pickles are refused: no part of it is of use."""
    try:
        yield
    except UserError:
        shutil.rmtree(target)
        raise


def _copy_all(source: Path, origins: dict[str, str], into: Path) -> None:
    """Copy revisions; `origins` has the repository of each."""
    sizes, pickles = {}, {}
    for revision in origins:
        paths = sorted(path for path in (source / revision).rglob("*") if path.is_file())
        names = {path.relative_to(source / revision).as_posix(): path for path in paths}
        pickles[revision] = pickles_of(str(source / revision), names)
        wanted = [*filter(_is_wanted, names), *pickles[revision]]
        if pickles[revision] and MODEL_INDEX in wanted:
            wanted.remove(MODEL_INDEX)  # of files that are not there
        sizes[revision] = {name: names[name].stat().st_size for name in wanted}
    check_revisions(str(source), list(origins))
    _check_room(sizes, into)
    with Progress("copy", total=len(origins)) as progress:
        for revision, repo in origins.items():
            copied = [name for name in sizes[revision] if name not in pickles[revision]]
            _copy(source / revision, into / revision, repo, copied, pickles[revision])
            progress.advance(GB=sum(sizes[revision].values()) / 1e9)


def _copy(source: Path, target: Path, repo: str, names: list[str], pickles: list[str]) -> None:
    from ckpt_tools.released.pickles import convert, write_index

    record, (_, recorded) = read_download(source), read_lineage(source) or ({}, {})
    recorded = recorded | (record.files if record else {})
    converted = dict(record.converted) if record else {}
    with committed_directory(target) as aside:
        files = {}
        for name in names:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, aside / name)
            fsync_path(aside / name)
            files[name] = _vouched(aside / name, source / name, recorded.get(name))
        for name in pickles:
            origin = _vouched(source / name, source / name, recorded.get(name))
            converted[converted_name(name)] = convert(source / name, origin, aside)
        if pickles:
            write_index(aside, converted)
            files = record_files(aside, "sha256")
        commit = record.commit if record else None
        _seal(
            aside,
            DownloadRecord(
                repo=repo, revision=target.name, commit=commit, files=files, converted=converted
            ),
        )


def _vouched(path: Path, source: Path, recorded: FileRecord | None) -> FileRecord:
    """Return size and hash of a file; UserError if its source recorded others."""
    # Hashed as the source recorded it, else the two could not be compared.
    found = hash_file(path, recorded.algorithm if recorded else "sha256")
    if recorded not in (None, found):
        raise UserError(f"{source} was changed after it was written; restore it")
    return found


def fetch_tokenizer(repo: str, out: Path) -> None:
    """Write a directory with the tokenizer of a repository; a complete one is left unchanged.

    A local directory is copied every time, so that changes reach the copy.

    Raises:
        UserError: the hub is not reached, the repository holds no tokenizer.json, or `out` is
            something else.
    """
    check_replaceable(out)
    if Path(repo).is_dir():
        load_tokenizer(Path(repo))
        with committed_directory(out) as aside:
            copy_files(Path(repo), aside, TOKENIZER_FILES)
        return
    if (out / TOKENIZER_JSON).is_file():
        load_tokenizer(out)
        return
    from ckpt_tools.released.hub import hub

    with hub(repo) as api, committed_directory(out) as aside:
        patterns = list(TOKENIZER_FILES)
        api.snapshot_download(repo, revision="main", local_dir=aside, allow_patterns=patterns)
        shutil.rmtree(aside / HUB_STATE)
        load_tokenizer(aside)


def check_replaceable(out: Path) -> None:
    """Raise UserError where a directory holds anything but a tokenizer, which is replaced."""
    if out.exists() and not (
        out.is_dir() and {path.name for path in out.iterdir()} <= set(TOKENIZER_FILES)
    ):
        raise UserError(f"{out} exists and holds more than a tokenizer; give another directory")
