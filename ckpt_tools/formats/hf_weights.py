"""The weights of an HF directory: its safetensors files, opened by header alone."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from base.errors import UserError
from base.files import check_fetched
from base.reading import parse_json
from ckpt_tools.formats.weight_files import weight_files
from ckpt_tools.formats.weights import FileTensor
from train.model.families import FAMILIES, LAYERS

# Constants that older versions of transformers wrote among the weights, and that modules now make
# themselves: rotary frequencies of all families, and what a row has beside them.
LEGACY_BUFFERS = re.compile(
    "|".join(
        pattern
        for row in FAMILIES.values()
        for pattern in (
            rf"{row.decoder}\.({LAYERS}\.\d+\.{row.attention}\.)?rotary_emb\.inv_freq",
            *(
                [rf"{row.decoder}\.{LAYERS}\.\d+\.{row.legacy_buffers}"]
                if row.legacy_buffers
                else []
            ),
        )
    )
)
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
        UserError: the file is not safetensors, was not fetched, is truncated, or uses a dtype torch
            does not have.
    """
    check_fetched(path)
    try:
        with safe_open(path, framework="pt"):
            pass  # the header is sound and covers the file exactly
        # 8 bytes hold the header's length; offsets count from the header's end.
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = parse_json(file.read(length), f"the header of {path}")
    except SafetensorError as error:
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


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a small safetensors file; UserError if it is damaged."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); restore it and run again") from None


class HFWeights:
    """The weights of an HF directory: every key of every file, but for `LEGACY_BUFFERS`."""

    def __init__(self, directory: Path) -> None:
        self.tensors: dict[str, FileTensor] = {}
        for path in weight_files(directory):
            tensors = {
                name: tensor
                for name, tensor in read_header(path).items()
                if not LEGACY_BUFFERS.fullmatch(name)
            }
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
