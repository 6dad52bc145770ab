"""The files that hold the weights of an HF directory. Needs neither torch nor transformers."""

import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, Field

from base.errors import UserError
from base.reading import read_model
from train.run.directory import MODEL_INDEX, MODEL_WEIGHTS

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")

PICKLE = re.compile(r"pytorch_model(-(?P<number>\d{5})-of-(?P<count>\d{5}))?\.bin")
PICKLE_INDEX = "pytorch_model.bin.index.json"


class _Index(BaseModel):
    """The index of several files."""

    weight_map: dict[str, str] = Field(min_length=1)


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold the weights: those of the index, or `model.safetensors`.

    Other weights beside them, such as `pytorch_model.bin` or `model.fp16.safetensors`, are not
    read: no program reads them either where these are.

    Raises:
        UserError: neither exists, both do and are not the same, the index is damaged, or a file
            that it lists is missing or outside the directory.
    """
    index, names = directory / MODEL_INDEX, {MODEL_WEIGHTS}
    if index.exists():
        names = set(read_model(_Index, index).weight_map.values())
        if names != {MODEL_WEIGHTS} and (directory / MODEL_WEIGHTS).is_file():
            raise UserError(
                f"{directory} holds {MODEL_WEIGHTS} and {MODEL_INDEX}, which names other files:"
                " programs read one or the other; find out which is the model, and move the other"
                " to a directory of its own"
            )
    elif not (directory / MODEL_WEIGHTS).is_file():
        raise UserError(f"{directory} holds no safetensors weights; give a complete HF directory")
    # A plain name has no slash, so an index cannot lead out of its directory.
    for name in sorted(names):
        if not PLAIN_NAME.fullmatch(name) or not (directory / name).is_file():
            raise UserError(f"{index} names '{name}', which is not a file beside it; restore both")
    return [directory / name for name in sorted(names)]


def pickles_of(source: str, names: Iterable[str]) -> list[str]:
    """Return the pickles that hold a revision's weights; none where it has safetensors.

    UserError where they are not one file, or all the shards of one model.
    """
    files = {name for name in names if "/" not in name}
    if any(name.endswith(".safetensors") for name in files):
        return []
    found = {name: match for name in sorted(files) if (match := PICKLE.fullmatch(name))}
    if len(found) > 1 or any(match["count"] for match in found.values()):
        counts = {int(match["count"] or 0) for match in found.values()}
        numbers = [int(match["number"] or 0) for match in found.values()]
        if len(counts) > 1 or numbers != list(range(1, len(found) + 1)) or counts != {len(found)}:
            raise UserError(
                f"{source} holds {', '.join(found)[:200]}, which are not all shards of one model;"
                " leave it out"
            )
    return list(found)


def converted_name(name: str) -> str:
    """Return the name of the safetensors file of a pickle.

    >>> converted_name("pytorch_model-00001-of-00002.bin")
    'model-00001-of-00002.safetensors'
    """
    return f"{name.removeprefix('pytorch_').removesuffix('.bin')}.safetensors"
