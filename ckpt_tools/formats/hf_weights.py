"""The weights of an HF directory: its safetensors files, opened by header alone."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from base.errors import UserError
from ckpt_tools.formats.weights import Described, FileTensor
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


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return every tensor of a safetensors file by name.

    Raises:
        UserError: it is none, it is truncated, or it holds a type that torch has no name for.
    """
    try:
        with safe_open(path, framework="pt"):
            pass  # the header is sound and covers the file exactly
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, json.JSONDecodeError) as error:
        raise UserError(f"{path} is damaged ({error}); restore it and run again") from None
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in TORCH_DTYPES:
            raise UserError(
                f"{path}: '{name}' is of type {entry['dtype']}, which is not supported here;"
                " convert it"
            )
        begin, _ = entry["data_offsets"]
        shape = tuple(entry["shape"]) or (1,)  # a scalar is one row
        tensors[name] = FileTensor(path, 8 + length + begin, shape, TORCH_DTYPES[entry["dtype"]])
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold the weights: those of the index, or `model.safetensors`.

    Raises:
        UserError: there is neither, a file of the index is missing, or it names one outside of the
            directory.
    """
    index = directory / INDEX_JSON
    if not index.exists():
        if not (directory / MODEL_WEIGHTS).is_file():
            raise UserError(f"{directory} holds no safetensors weights; give a complete directory")
        return [directory / MODEL_WEIGHTS]
    names = sorted(set(_weight_map(index).values()))
    for name in names:
        if not PLAIN_NAME.fullmatch(name):
            raise UserError(
                f"{index} names '{name}', which is no file of its directory; restore the index"
            )
        if not (directory / name).is_file():
            raise UserError(f"{directory / name} is missing; restore it")
    return [directory / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        names = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{index} is damaged ({error!r}); restore it") from None
    if not (names and isinstance(names, dict) and all(isinstance(n, str) for n in names.values())):
        raise UserError(f"{index} maps no tensor to a file; restore it")
    return names


class HFWeights:
    """The weights of an HF directory, every key of every file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stored: dict[str, FileTensor] = {}
        for path in weight_files(directory):
            for name, tensor in read_header(path).items():
                if name in self.stored:
                    raise UserError(
                        f"'{name}' lies in {self.stored[name].path} and in {path}; remove one of"
                        " them"
                    )
                self.stored[name] = tensor
        index = directory / INDEX_JSON
        if index.exists():
            mapped = {(name, directory / file) for name, file in _weight_map(index).items()}
            held = {(name, tensor.path) for name, tensor in self.stored.items()}
            if mapped != held:
                name, _ = min(mapped ^ held)
                raise UserError(f"{index} and the files differ in '{name}'; restore them")

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Shape and type of every tensor, in the order of the files."""
        return {name: tensor.described for name, tensor in self.stored.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of a tensor."""
        return self.stored[name].read(start, stop)
