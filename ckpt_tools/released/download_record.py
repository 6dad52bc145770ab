"""download.json, which makes a downloaded revision complete."""

import json
import shutil
from pathlib import Path

from pydantic import ValidationError

from ckpt_tools.hf_directory import VERIFICATION_PROBE
from train.command import UserError, explain_validation
from train.frozen import Frozen
from train.run_directory import FileRecord, check_inside

DOWNLOAD_JSON = "download.json"
DATA_SUFFIXES = (".safetensors", ".json", ".jinja")
VOCABULARIES = ("tokenizer.model", "merges.txt", "vocab.txt")


class DownloadRecord(Frozen):
    """Where the files of a directory come from, and what they are. Written last: without it there is no download."""

    repo: str  # of the hub, or the run that they were exported from
    revision: str
    commit: str | None  # that the revision stood for; None: copied from a directory that does not tell
    files: dict[str, FileRecord]


def is_wanted(name: str) -> bool:
    """Whether a file of a repository is part of the model: data on its first level, and what proves an export."""
    if "/" in name:
        return name == VERIFICATION_PROBE
    return name in VOCABULARIES or (name.endswith(DATA_SUFFIXES) and name != DOWNLOAD_JSON)


def check_disk(directory: Path, needed: int) -> None:
    """UserError unless `needed` bytes are free where `directory` is or will be."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise UserError(
            f"{needed / 1e9:,.1f} GB are to be written, but {directory} has {free / 1e9:,.1f} GB left; free space, "
            f"choose fewer revisions with --every, or give another directory"
        )


def read_download(directory: Path) -> DownloadRecord | None:
    """download.json of a directory, None if it has none."""
    path = directory / DOWNLOAD_JSON
    if not path.is_file():
        return None
    try:
        record = DownloadRecord.model_validate(json.loads(path.read_text()))
    except ValidationError as error:
        raise explain_validation(str(path), error) from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise UserError(f"{path} is damaged; remove {directory} and download it again") from None
    check_inside(path, record.files)
    return record


def first_wrong_size(directory: Path, record: DownloadRecord) -> str | None:
    """The first file that is missing or has another size than recorded; None if there is none."""
    for name, file in record.files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != file.bytes:
            return f"{path} is missing or truncated"
    return None
