"""`.metadata` of torch's distributed checkpoints, read without running code from the file.

The file is a pickle, and a pickle may name any function to be called. The hash in checkpoint.json
shows that it is the file that was written; it says nothing about who wrote both.
"""

import io
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from base.errors import UserError
from base.files import read_regular

METADATA = ".metadata"  # the place of each part
RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.planner": (
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
}  # all names that torch 2.13 writes there, by module: its own records, and the types of tensors


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path) -> None:
        super().__init__(io.BytesIO(read_regular(path)))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return what RECORDS names; UserError for any other name."""
        if (module, name) == ("builtins", "getattr"):
            return self._member
        if name not in RECORDS.get(module, ()):
            raise self._refusal(module, name)
        return super().find_class(module, name)

    def _member(self, enumeration: Any, name: Any) -> Enum:
        """Return a member of an enumeration, which Python 3.11.2 writes as getattr(CLASS, NAME)."""
        if not (isinstance(enumeration, type) and issubclass(enumeration, Enum)):
            raise self._refusal("builtins", "getattr")
        return enumeration[name]

    def _refusal(self, module: str, name: str) -> UserError:
        return UserError(
            f"{self._path} names {module}.{name}, which no checkpoint holds; do not open it with"
            " other programs, and ask where it comes from"
        )


def read_metadata(checkpoint: Path) -> Metadata:
    """Return the metadata of a checkpoint directory; UserError if it is damaged or hostile."""
    path = checkpoint / METADATA
    try:
        metadata = _Unpickler(path).load()
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001  a damaged pickle raises nearly anything
        raise UserError(f"{path} is damaged ({error}); give another checkpoint") from None
    if not isinstance(metadata, Metadata):
        raise UserError(f"{path} holds no metadata of a checkpoint; give another checkpoint")
    return metadata
