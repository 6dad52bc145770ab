"""`.metadata` of torch's distributed checkpoints, read without running code from the file.

The file is a pickle, and a pickle may name any function to be called. The hash in checkpoint.json
shows that it is the file that was written; it says nothing about who wrote both.
"""

import io
import pickle
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from base.errors import UserError
from base.reading import read_regular

METADATA = ".metadata"  # the place of each part
RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.planner": (  # of plans, which megatron-core 0.16 wrote there too
        *("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": (
        *("Size", "device", "float64", "float32", "bfloat16", "float16", "float8_e4m3fn"),
        *("float8_e5m2", "int64", "int32", "int16", "int8", "uint8", "bool"),
    ),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # of Python 3.13
}  # all names that torch writes there, by module: its own records, and the types of tensors


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(read_regular(path)))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return what RECORDS names; UserError for any other name."""
        # getattr itself would hand out any attribute of what RECORDS names.
        if (module, name) == ("builtins", "getattr"):
            return self._member
        if name not in RECORDS.get(module, ()):
            raise self._refusal(module, name)
        return super().find_class(module, name)

    def _member(self, enumeration: Any, name: Any) -> Enum:
        """Return a member of an enumeration, which Python 3.11.2 wrote as getattr(CLASS, NAME)."""
        if not (isinstance(enumeration, type) and issubclass(enumeration, Enum)):
            raise self._refusal("builtins", "getattr")
        return enumeration[name]

    def _refusal(self, module: str, name: str) -> UserError:
        return UserError(
            f"{self._path} names {module}.{name}, which no checkpoint holds; do not open it with"
            " other programs, and ask where it comes from"
        )


def read_metadata(checkpoint: Path) -> Metadata:
    """Return the metadata of a checkpoint directory; UserError if it is damaged or hostile.

    Every record has all of its fields, and each box lies within its tensor and in a file of the
    directory.
    """
    path = checkpoint / METADATA
    try:
        metadata = _Unpickler(path).load()
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  a damaged pickle raises nearly anything
        raise UserError(f"{path} is damaged ({error}); give another checkpoint") from None
    if not isinstance(metadata, Metadata):
        raise UserError(f"{path} holds no metadata of a checkpoint; give another checkpoint")
    try:
        for key, record in metadata.state_dict_metadata.items():
            _check_tensor(key, record)
        for index, storage in (metadata.storage_data or {}).items():
            _check_storage(index, storage)
    except (AttributeError, TypeError, ValueError) as error:  # a field is missing or another's
        raise UserError(f"{path} is damaged ({error}); give another checkpoint") from None
    return metadata


def _check_tensor(key: Any, record: Any) -> None:
    """Raise ValueError, TypeError or AttributeError for what is no record of a tensor or object."""
    if isinstance(record, BytesStorageMetadata) and isinstance(key, str):
        return
    size = _size(record.size)
    boxes = [(_size(chunk.offsets), _size(chunk.sizes)) for chunk in record.chunks]
    if not (isinstance(key, str) and isinstance(record.properties.dtype, torch.dtype)):
        raise ValueError(f"{key!r:.80} is not a tensor")
    for offsets, sizes in boxes:
        if not len(offsets) == len(sizes) == len(size) or any(
            first + count > whole for first, count, whole in zip(offsets, sizes, size, strict=True)
        ):
            raise ValueError(f"a part of {key!r:.80} is outside of it")


def _size(value: Any) -> torch.Size:
    if not isinstance(value, torch.Size) or min(value, default=0) < 0:
        raise ValueError(f"{value!r:.80} is no shape")
    return value


def _check_storage(index: Any, storage: Any) -> None:
    """Raise ValueError, TypeError or AttributeError for what is no place in a file beside it."""
    name, begin, length = storage.relative_path, storage.offset, storage.length
    if not isinstance(name, str) or PurePath(name).name != name or "\0" in name:
        raise ValueError(f"{name!r:.80} is not a file of it")
    if not (type(begin) is type(length) is int and begin >= 0 and length >= 0):
        raise ValueError(f"{begin!r:.20} and {length!r:.20} are no place in {name!r:.80}")
    if not (isinstance(index, MetadataIndex) and isinstance(index.fqn, str)):
        raise ValueError(f"{index!r:.80} names no tensor")
    hash(index)
