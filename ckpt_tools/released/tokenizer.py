"""The tokenizer of a model on the hub or in a directory, without the weights."""

import shutil
from pathlib import Path

from base.errors import UserError
from base.files import committed_directory
from ckpt_tools.released.download_record import HUB_STATE, VOCABULARIES
from train.data.tokenizer import TOKENIZER_JSON, load_tokenizer

TOKENIZER_FILES = (
    *(TOKENIZER_JSON, "tokenizer_config.json", "special_tokens_map.json"),
    *VOCABULARIES,
)


def fetch_tokenizer(repo: str, out: Path) -> None:
    """Write a directory with the tokenizer of a repository; a whole one is left unchanged.

    A local directory is copied, and the copy follows it where it was changed.

    Raises:
        UserError: the hub is not reached, the repository holds no tokenizer.json, or `out` is
            something else.
    """
    if Path(repo).is_dir():
        check_replaceable(out)
        _copy(Path(repo), out)
        return
    if (out / TOKENIZER_JSON).is_file():
        load_tokenizer(out)
        return
    if out.exists():
        raise UserError(
            f"{out} is there and holds no {TOKENIZER_JSON}; remove it or give another directory"
        )
    from ckpt_tools.released.hub import hub

    with hub(repo) as api, committed_directory(out) as aside:
        api.snapshot_download(
            repo, revision="main", local_dir=aside, allow_patterns=list(TOKENIZER_FILES)
        )
        shutil.rmtree(aside / HUB_STATE)
        load_tokenizer(aside)


def check_replaceable(out: Path) -> None:
    """Raise UserError where a directory holds anything but a tokenizer, which is replaced."""
    if out.exists() and not (
        out.is_dir() and {path.name for path in out.iterdir()} <= set(TOKENIZER_FILES)
    ):
        raise UserError(f"{out} is there and holds more than a tokenizer; give another directory")


def _copy(source: Path, out: Path) -> None:
    load_tokenizer(source)
    with committed_directory(out) as aside:
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, aside / name)
