"""The files that hold the weights of an HF directory. Needs neither torch nor transformers."""

import re
from pathlib import Path

from pydantic import BaseModel, Field

from base.errors import UserError
from base.reading import read_model
from train.run.directory import MODEL_INDEX, MODEL_WEIGHTS

PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")


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
