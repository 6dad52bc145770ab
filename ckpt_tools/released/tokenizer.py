"""The tokenizer of a model on the hub, alone."""

from pathlib import Path

from ckpt_tools.released.download_record import VOCABULARIES
from ckpt_tools.released.hub import hub
from train.command import UserError
from train.run_directory import committed_directory
from train.tokenizer import TOKENIZER_JSON, load_tokenizer

TOKENIZER_FILES = (TOKENIZER_JSON, "tokenizer_config.json", "special_tokens_map.json", *VOCABULARIES)
HUB_STATE = ".cache"  # what huggingface_hub keeps beside the files it fetched


def fetch_tokenizer(repo: str, out: Path) -> None:
    """Writes a directory with the tokenizer of a repository; one that is there and whole is left as it is.

    Raises:
        UserError: the hub is not reached, the repository holds no tokenizer.json, or `out` is something else.
    """
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
