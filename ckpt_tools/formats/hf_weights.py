"""The weights of an HF directory: its safetensors files, opened by header alone."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ckpt_tools.formats.weights import Described, FileTensor
from train.command import UserError
from train.run_directory import MODEL_WEIGHTS

INDEX_JSON = "model.safetensors.index.json"
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
TORCH_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
HEADER_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def read_header(path: Path) -> dict[str, FileTensor]:
    """Every tensor of a safetensors file by name.

    Raises:
        UserError: it is none, it is truncated, or it holds a type that torch has no name for.
    """
    try:
        with safe_open(path, framework="pt"):  # checks that the header is sound and covers the file exactly
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}); restore it and run again") from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in TORCH_DTYPES:
            raise UserError(f"{path}: '{name}' is of type {entry['dtype']}, which is not supported here; convert it")
        begin, _ = entry["data_offsets"]
        shape = tuple(entry["shape"]) or (1,)  # a scalar is one row
        tensors[name] = FileTensor(path, 8 + length + begin, shape, TORCH_DTYPES[entry["dtype"]])
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights: those of the index, or `model.safetensors`.

    Raises:
        UserError: there is neither, a file of the index is missing, or it names one outside of the directory.
    """
    index = directory / INDEX_JSON
    if not index.exists():
        if not (directory / MODEL_WEIGHTS).is_file():
            raise UserError(f"{directory} holds no safetensors weights; give a complete directory")
        return [directory / MODEL_WEIGHTS]
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if not PLAIN_NAME.fullmatch(name):
            raise UserError(f"{index} names '{name}', which is no file of its directory; restore the index")
        if not (directory / name).is_file():
            raise UserError(f"{directory / name} is missing; restore it")
    return [directory / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        held = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{index} is damaged ({error!r}); restore it") from None
    if not isinstance(held, dict) or not held or not all(isinstance(name, str) for name in held.values()):
        raise UserError(f"{index} maps no tensor to a file; restore it")
    return held


class HFWeights:
    """The weights of an HF directory, every key of every file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stored: dict[str, FileTensor] = {}
        files = weight_files(directory)
        for path in files:
            for name, tensor in read_header(path).items():
                if name in self.stored:
                    raise UserError(f"'{name}' lies in {self.stored[name].path} and in {path}; remove one of them")
                self.stored[name] = tensor
        if (directory / INDEX_JSON).exists():
            mapped = {name: directory / file for name, file in _weight_map(directory / INDEX_JSON).items()}
            found = {name: tensor.path for name, tensor in self.stored.items()}
            differing = sorted(name for name in mapped.keys() | found.keys() if mapped.get(name) != found.get(name))
            if differing:
                raise UserError(f"{directory / INDEX_JSON} and the files differ in '{differing[0]}'; restore them")

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Every tensor by name, in the order of the files."""
        return {name: tensor.described for name, tensor in self.stored.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor."""
        return self.stored[name].read(start, stop)
