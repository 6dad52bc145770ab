"""The tokenizer of a model on the hub or in a directory, without the weights."""

import shutil
from pathlib import Path

from base.errors import UserError
from base.files import committed_directory
from ckpt_tools.hf.directory import TOKENIZER_FILES, copy_files
from ckpt_tools.released.download_record import HUB_STATE
from train.data.tokenizer import TOKENIZER_JSON, load_tokenizer


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
