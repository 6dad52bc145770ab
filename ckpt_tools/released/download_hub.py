"""Fetching revisions from the hub: planned and checked as a whole, then one after another, files side by side."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils.tqdm import disable_progress_bars

from ckpt_tools.formats.hf_weights import weight_files
from ckpt_tools.released.download_record import DOWNLOAD_JSON, DownloadRecord, check_disk, is_wanted, read_download
from ckpt_tools.released.hub import hub
from train.command import Progress, UserError
from train.frozen import Frozen
from train.run_directory import FileRecord, first_damage, fsync_path, record_file, write_json

FILES_AT_ONCE = 8  # as huggingface_hub's snapshot_download
HUB_STATE = ".cache"  # where huggingface_hub keeps what it knows about files in a directory


class _Plan(Frozen):
    """What a revision stands for on the hub."""

    repo: str
    revision: str
    commit: str
    sizes: dict[str, int]  # bytes by file
    sha256: dict[str, str]  # of large files, all that the hub tells


def fetch_all(repo: str, revisions: list[str], into: Path) -> None:
    """Fetches revisions that are not complete; see `download.download`."""
    disable_progress_bars()  # one per file, over ours
    with hub(repo) as api:
        plans = [_plan(api, repo, revision) for revision in revisions]
        needed = sum(_missing_bytes(plan, into) for plan in plans)
        into.mkdir(parents=True, exist_ok=True)
        check_disk(into, needed)
        with Progress(
            "download, MB", total=sum(_megabytes(size) for plan in plans for size in plan.sizes.values())
        ) as progress:
            for plan in plans:
                _fetch(api, plan, into, progress)


def _megabytes(size: int) -> int:
    return max(1, round(size / 1e6))


def _plan(api: HfApi, repo: str, revision: str) -> _Plan:
    info = api.model_info(repo, revision=revision, files_metadata=True)
    files = [file for file in info.siblings or [] if is_wanted(file.rfilename)]
    if not any(file.rfilename.endswith(".safetensors") for file in files):
        raise UserError(f"{repo} has no safetensors at {revision}; leave it out, pickled weights are not opened")
    if info.sha is None or any(file.size is None for file in files):
        raise UserError(f"{api.endpoint} tells neither commit nor sizes of {repo} at {revision}; ask another hub")
    return _Plan(
        repo=repo,
        revision=revision,
        commit=info.sha,
        sizes={file.rfilename: file.size or 0 for file in files},
        sha256={file.rfilename: file.lfs.sha256 for file in files if file.lfs},
    )


def _partial(plan: _Plan, into: Path) -> Path:
    return into / f".{plan.revision}.partial"


def _missing_bytes(plan: _Plan, into: Path) -> int:
    partial = _partial(plan, into)
    return sum(size for name, size in plan.sizes.items() if not (partial / name).is_file())


@contextmanager
def _only_process(path: Path) -> Iterator[None]:
    """UserError while another process holds the lock `path`."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process fetches {path.stem[1:]} there; wait until it ends and run again"
            ) from None
        try:
            yield
        finally:
            path.unlink()


def _fetch(api: HfApi, plan: _Plan, into: Path, progress: Progress) -> None:
    """Fetches the files that are not there yet into a directory aside, which takes its name when all are as planned."""
    target, partial = into / plan.revision, _partial(plan, into)
    with _only_process(into / f".{plan.revision}.lock"):
        if not _take_up(target, partial, plan):
            progress.advance(sum(map(_megabytes, plan.sizes.values())))
            return
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            futures = {pool.submit(_fetch_file, api, plan, name, partial): name for name in plan.sizes}
            try:
                files = {}
                for future in as_completed(futures):
                    files[futures[future]] = future.result()
                    progress.advance(_megabytes(plan.sizes[futures[future]]))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        try:
            weight_files(partial)
        except UserError as error:
            raise UserError(f"{plan.repo} is not whole at {plan.revision} ({error}); leave it out") from None
        shutil.rmtree(partial / HUB_STATE, ignore_errors=True)
        record = DownloadRecord(
            repo=plan.repo, revision=plan.revision, commit=plan.commit, files=dict(sorted(files.items()))
        )
        write_json(partial / DOWNLOAD_JSON, record.model_dump(mode="json"))
        os.rename(partial, target)
        fsync_path(into)


def _take_up(target: Path, partial: Path, plan: _Plan) -> bool:
    """Makes `partial` hold nothing but whole files of an earlier attempt, or of a download that was damaged since.

    Returns:
        False if there is nothing to do: another process was faster.
    """
    record = read_download(target) if target.exists() else None
    if record is not None:
        damaged = [name for name, file in record.files.items() if first_damage(target, {name: file})]
        if not damaged:
            return False
        shutil.rmtree(partial, ignore_errors=True)
        for name in (DOWNLOAD_JSON, *damaged):
            (target / name).unlink(missing_ok=True)
        os.rename(target, partial)
    partial.mkdir(exist_ok=True)
    for path in sorted(partial.rglob("*")):
        name = path.relative_to(partial).as_posix()
        of_hub = name.split("/")[0] == HUB_STATE
        if path.is_file() and (path.suffix == ".incomplete" if of_hub else name not in plan.sizes):
            path.unlink()
    return True


def _fetch_file(api: HfApi, plan: _Plan, name: str, partial: Path) -> FileRecord:
    api.hf_hub_download(plan.repo, name, revision=plan.commit, local_dir=partial)
    record = record_file(partial / name)
    if record.bytes != plan.sizes[name] or plan.sha256.get(name, record.sha256) != record.sha256:
        (partial / name).unlink()
        raise UserError(f"{name} of {plan.repo} at {plan.revision} came with other bytes than the hub says; run again")
    return record
