"""Pickled weights, `pytorch_model*.bin`, written as safetensors: tensors alone, bit for bit.

A pickle can name any function to be called. torch's own allow-list (`weights_only`) opens it, and
whatever else is in it is refused before anything runs.
"""

import errno
import os
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from base.errors import UserError
from base.files import FileRecord, fsync_path, open_to_readers, scratch_directory, write_json
from base.reading import read_model
from ckpt_tools.formats.hf_weights import HEADER_DTYPES, read_header
from ckpt_tools.formats.weight_files import PICKLE_INDEX, converted_name
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.directory import Conversion
from train.model.families import FAMILIES
from train.run.dcp_boxes import ZIP
from train.run.directory import MODEL_INDEX, MODEL_WEIGHTS


class _Index(BaseModel):
    """The index of pickled shards."""

    weight_map: dict[str, str]


def convert(pickle: Path, record: FileRecord, into: Path) -> Conversion:
    """Write the safetensors file of a pickle into a directory, whole or not at all.

    The directory holds config.json, which says whether the head is the embedding. Both files are
    read again and compared bit for bit. The memory taken is that of one shard. The pickle is left
    as it is.

    Raises:
        UserError: the pickle holds more than tensors, or is damaged.
    """
    weights = _tensors(pickle)
    left_out = _tied(weights, into)
    kept = {name: tensor for name, tensor in weights.items() if name not in left_out}
    name = converted_name(pickle.name)

    # A file that a killed process left there is removed by the next conversion.
    with scratch_directory(into / ".conversion") as aside:
        save_file(_separate(kept), aside / name, {"format": "pt"})
        open_to_readers(aside / name)
        _verify(pickle, aside / name, kept.keys())
        fsync_path(aside / name)
        os.replace(aside / name, into / name)
    fsync_path(into)
    return Conversion(
        pickle=pickle.name, record=record, left_out=sorted(left_out), torch=str(torch.__version__)
    )


def write_index(directory: Path, converted: Mapping[str, Conversion]) -> None:
    """Write the index of converted shards, unless they are one file; the pickles' is removed.

    UserError where two shards hold a tensor, or the pickles' own index says something else.
    """
    weight_map, size = dict[str, str](), 0
    for name in sorted(converted):
        for tensor, described in read_header(directory / name).items():
            if tensor in weight_map:
                raise UserError(f"'{tensor}' is in two shards of {directory}; leave it out")
            weight_map[tensor] = name
            size += described.nbytes
    _check_index(directory / PICKLE_INDEX, weight_map, converted)
    if set(converted) != {MODEL_WEIGHTS}:
        write_json(
            directory / MODEL_INDEX,
            {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))},
        )
    (directory / PICKLE_INDEX).unlink(missing_ok=True)


def _check_index(
    path: Path, weight_map: Mapping[str, str], converted: Mapping[str, Conversion]
) -> None:
    """Raise UserError unless the pickles' index, if there is one, names what was converted."""
    if not path.is_file():
        return
    left_out = {name for conversion in converted.values() for name in conversion.left_out}
    stated = {
        tensor: converted_name(name)
        for tensor, name in read_model(_Index, path).weight_map.items()
        if tensor not in left_out
    }
    wrong = sorted(stated.items() ^ weight_map.items())
    if wrong:
        raise UserError(
            f"{path} does not fit its shards at '{wrong[0][0]}'; leave the revision out"
        )


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickle, mapped; UserError if it holds anything else."""
    refusal = "; nothing of it was run, leave the revision out"
    if not _is_as_saved(path):
        raise UserError(f"{path} is not a zip file as torch.save writes it{refusal}")
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle raises nearly anything
        if _is_of_the_machine(error):
            raise
        raise UserError(f"{path} holds more than tensors, or is damaged{refusal}") from None
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path} holds no tensors by name{refusal}")
    weights: dict[str, Tensor] = {}
    for name, tensor in content.items():
        if not isinstance(name, str) or not _is_plain(tensor):
            raise UserError(f"{path} holds {str(name)[:100]!r}, which is no plain tensor{refusal}")
        weights[name] = tensor.detach()
    # A few bytes can claim to be a tensor of any size: a tied pair alone is twice the file.
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    if size > 2 * path.stat().st_size:
        raise UserError(f"{path} claims tensors of {size:,} bytes, more than are in it{refusal}")
    return weights


def _is_as_saved(path: Path) -> bool:
    """Return whether a file is a zip file whose members are stored, as torch.save writes it.

    torch maps members as they are: it would take compressed bytes for numbers.
    """
    with path.open("rb") as file:
        if file.read(len(ZIP)) != ZIP:
            return False
    try:
        with zipfile.ZipFile(path) as archive:
            return all(each.compress_type == zipfile.ZIP_STORED for each in archive.infolist())
    except Exception as error:  # a damaged file raises nearly anything
        if _is_of_the_machine(error):
            raise
        return False


def _is_of_the_machine(error: Exception) -> bool:
    """Return whether an error says nothing of the file that was read, as that of a full memory."""
    # EINVAL is of seeking in a torn file.
    is_of_disk = isinstance(error, OSError) and error.errno != errno.EINVAL
    return isinstance(error, MemoryError) or is_of_disk


def _separate(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors that are contiguous and share no memory, as safetensors asks."""
    users = Counter(tensor.untyped_storage().data_ptr() for tensor in weights.values())
    return {
        name: tensor.clone(memory_format=torch.contiguous_format)
        if users[tensor.untyped_storage().data_ptr()] > 1
        else tensor.contiguous()
        for name, tensor in weights.items()
    }


def _is_plain(value: object) -> bool:
    """Return whether a value is a dense tensor in memory of a dtype that safetensors has.

    Its numbers are its bytes: torch can mark a tensor whose sign is to be changed as it is read.
    """
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and value.dtype in HEADER_DTYPES
        and not value.is_neg()
    )


def _tied(weights: Mapping[str, Tensor], directory: Path) -> set[str]:
    """Return the head's name where config.json ties it to the embedding whose bytes it shares."""
    config = read_config(directory)
    row = FAMILIES[config.model_type]
    head = f"{row.head_in_files}.weight"
    if not config.tie_word_embeddings or head not in weights:
        return set()
    place = _place(weights[head])
    shares = any(name != head and _place(tensor) == place for name, tensor in weights.items())
    return {head} if shares else set()


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _verify(pickle: Path, written: Path, names: Iterable[str]) -> None:
    """Raise UserError unless a file holds those tensors of a pickle, both read again."""
    again = _tensors(pickle)
    with safe_open(written, framework="pt") as file:
        if set(file.keys()) != set(names):
            raise UserError(f"{pickle} was not converted whole; run again")
        for name in names:
            if not _same_bits(again[name], file.get_tensor(name)):
                raise UserError(f"'{name}' of {pickle} was written with other bits; run again")


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8),
        other.contiguous().reshape(-1).view(torch.uint8),
    )
