"""The weights of an HF directory: its safetensors files, opened by header alone."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from base.errors import UserError, explain_validation
from base.files import read_regular
from ckpt_tools.formats.weights import FileTensor
from train.run.directory import MODEL_WEIGHTS

INDEX_JSON = "model.safetensors.index.json"
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
TORCH_DTYPES = {  # by their names in headers
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
HEADER_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class _Index(BaseModel):
    """The index of several files."""

    weight_map: dict[str, str] = Field(min_length=1)


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return every tensor of a safetensors file by name.

    Raises:
        UserError: the file is not safetensors, is truncated, or uses a dtype torch does not have.
    """
    try:
        with safe_open(path, framework="pt"):
            pass  # the header is sound and covers the file exactly
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); restore it and run again") from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in TORCH_DTYPES:
            raise UserError(f"{path}: '{name}' is of type {entry['dtype']}; convert it")
        begin, _ = entry["data_offsets"]
        shape = tuple(entry["shape"]) or (1,)  # a scalar is one row
        tensors[name] = FileTensor(shape, TORCH_DTYPES[entry["dtype"]], path, 8 + length + begin)
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold the weights: those of the index, or `model.safetensors`.

    Raises:
        UserError: neither exists, the index is damaged, or a file that it lists is missing or
            outside the directory.
    """
    index, names = directory / INDEX_JSON, {MODEL_WEIGHTS}
    if index.exists():
        try:
            names = set(_Index.model_validate_json(read_regular(index)).weight_map.values())
        except ValidationError as error:
            raise explain_validation(str(index), error) from None
    elif not (directory / MODEL_WEIGHTS).is_file():
        raise UserError(f"{directory} holds no safetensors weights; give a complete directory")
    for name in sorted(names):
        if not PLAIN_NAME.fullmatch(name) or not (directory / name).is_file():
            raise UserError(f"{index} names '{name}', which is not a file beside it; restore both")
    return [directory / name for name in sorted(names)]


class HFWeights:
    """The weights of an HF directory, every key of every file.

    Attributes:
        tensors: places of all, in the order of the files.
    """

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, FileTensor] = {}
        for path in weight_files(directory):
            tensors = read_header(path)
            twice = sorted(tensors.keys() & self.tensors.keys())
            if twice:
                raise UserError(
                    f"'{twice[0]}' is in {self.tensors[twice[0]].path} and in {path}; move one"
                    " of them away"
                )
            self.tensors |= tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor."""
        return self.tensors[name].read(start, stop)
