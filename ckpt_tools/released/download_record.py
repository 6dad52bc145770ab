"""download.json, which makes a downloaded revision complete."""

from pathlib import Path

from base.files import FileRecord, check_inside
from base.frozen import Frozen
from base.reading import as_model, read_sealed

DOWNLOAD_JSON = "download.json"
HUB_STATE = ".cache"  # directory of huggingface_hub's notes, beside the files that it fetched


class DownloadRecord(Frozen):
    """Origin and files of a directory. Written last: without it there is no download.

    Attributes:
        repo: of the hub, or the run that they were exported from.
        revision: of the repository.
        commit: of the revision; None: copied from a directory that does not record it.
        files: size and hash of each.
    """

    repo: str
    revision: str
    commit: str | None
    files: dict[str, FileRecord]


def read_download(directory: Path) -> DownloadRecord | None:
    """Return download.json of a directory, None if it has none; UserError if it was changed."""
    path = directory / DOWNLOAD_JSON
    if not path.is_file():
        return None
    record = as_model(DownloadRecord, read_sealed(path, "download it again"), path)
    check_inside(path, record.files)
    return record
