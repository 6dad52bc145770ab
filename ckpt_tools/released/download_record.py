"""download.json, which makes a downloaded revision complete."""

from pathlib import Path

from pydantic import ValidationError

from base.errors import explain_validation
from base.files import FileRecord, check_inside
from base.frozen import Frozen
from base.reading import read_regular

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
    """Return download.json of a directory, None if it has none."""
    path = directory / DOWNLOAD_JSON
    if not path.is_file():
        return None
    try:
        record = DownloadRecord.model_validate_json(read_regular(path))
    except ValidationError as error:
        raise explain_validation(str(path), error) from None
    check_inside(path, record.files)
    return record
