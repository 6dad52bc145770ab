"""The tokenizer of a model on the hub or in a directory, alone."""

import shutil
from pathlib import Path

from ckpt_tools.released.download_record import VOCABULARIES
from ckpt_tools.released.hub import hub
from train.command import UserError
from train.run_directory import committed_directory
from train.tokenizer import TOKENIZER_JSON, load_tokenizer

TOKENIZER_FILES = (TOKENIZER_JSON, "tokenizer_config.json", "special_tokens_map.json", *VOCABULARIES)
HUB_STATE = ".cache"  # what huggingface_hub keeps beside the files it fetched


def fetch_tokenizer(repo: str, out: Path) -> None:
    """Write a directory with the tokenizer of a repository; one that is there and whole is left as it is.

    A local directory is copied, and the copy follows it where it was changed.

    Raises:
        UserError: the hub is not reached, the repository holds no tokenizer.json, or `out` is something else.
    """
    if Path(repo).is_dir():
        check_replaceable(out)
        _copy(Path(repo), out)
        return
    if (out / TOKENIZER_JSON).is_file():
        load_tokenizer(out)
        return
    if out.exists():
        raise UserError(f"{out} is there and holds no {TOKENIZER_JSON}; remove it or give another directory")
    with hub(repo) as api, committed_directory(out) as aside:
        info = api.model_info(repo, revision="main")
        there = {file.rfilename for file in info.siblings or []}
        for name in TOKENIZER_FILES:
            if name in there:
                api.hf_hub_download(repo, name, revision=info.sha, local_dir=aside)
        for left in sorted((aside / HUB_STATE).rglob("*"), reverse=True):
            left.rmdir() if left.is_dir() else left.unlink()
        (aside / HUB_STATE).rmdir()
        load_tokenizer(aside)


def check_replaceable(out: Path) -> None:
    """UserError where a directory holds anything but a tokenizer, which a new one would replace."""
    if out.exists() and not (out.is_dir() and {path.name for path in out.iterdir()} <= set(TOKENIZER_FILES)):
        raise UserError(f"{out} is there and holds more than a tokenizer; give another directory")


def _copy(source: Path, out: Path) -> None:
    load_tokenizer(source)
    with committed_directory(out) as aside:
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, aside / name)
