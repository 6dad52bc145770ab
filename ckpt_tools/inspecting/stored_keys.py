"""Every key that a checkpoint or an HF directory stores, with its global shape and type; numbers are not read."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_tools.formats.hf_weights import HFWeights, read_header
from ckpt_tools.formats.megatron_shards import METADATA, optimizer_part
from ckpt_tools.formats.weights import Described
from train.command import UserError
from train.run_directory import FileRecord, first_damage

WEIGHTS, OBJECTS = "weights", "objects"  # groups of keys; objects are no tensors, such as Transformer Engine's states

Keys = dict[str, dict[str, Described | None]]  # by group and key; None: an object


def sharded_keys(checkpoint: Path, files: dict[str, FileRecord]) -> Keys:
    """Keys of torch's distributed checkpoint format, layers stacked as they are stored, by part of the optimizer.

    Raises:
        UserError: `.metadata`, a pickle, is not the recorded one. It was not opened then.
    """
    damage = first_damage(checkpoint, {METADATA: files[METADATA]})
    if damage:
        raise UserError(damage)
    stored = {
        key: Described(tuple(held.size), held.properties.dtype) if isinstance(held, TensorStorageMetadata) else None
        for key, held in FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items()
    }
    keys: Keys = defaultdict(dict)
    for key, tensor in stored.items():
        part = optimizer_part(key, stored)
        keys[f"optimizer {part[0]}" if part else WEIGHTS if tensor else OBJECTS][key] = tensor
    return keys


def safetensors_keys(directory: Path) -> Keys:
    """Keys of an HF directory or of a DeepSpeed checkpoint.

    Of the optimizer's state every rank holds a range of each flattened tensor: shapes are those of all ranges together.

    Raises:
        UserError: a file is damaged, or the index and the files differ.
    """
    keys: Keys = defaultdict(dict)
    keys[WEIGHTS] = dict(HFWeights(directory).tensors)
    for path in sorted(directory.glob("optimizer-*.safetensors")):
        for key, part in read_header(path).items():
            kind, _, name = key.partition("/")
            group = keys[f"optimizer {kind}"]
            before = group.get(name)
            group[name] = Described((part.shape[0] + (before.shape[0] if before else 0),), part.dtype)
    return keys


def summary(keys: Keys, listed: bool) -> dict[str, Any]:
    """Number of parameters, None without weights; keys, numbers and bytes of every group, and its keys if asked for."""
    tensors: dict[str, dict[str, Any]] = {}
    for group, held in keys.items():
        known = [tensor for tensor in held.values() if tensor]
        tensors[group] = {
            "keys": len(held),
            "numbers": sum(torch.Size(tensor.shape).numel() for tensor in known),
            "bytes": sum(tensor.nbytes for tensor in known),
        }
        if listed:
            tensors[group]["stored"] = {name: _shown(tensor) for name, tensor in sorted(held.items())}
    return {"parameters": tensors[WEIGHTS]["numbers"] if WEIGHTS in tensors else None, "tensors": tensors}


def _shown(tensor: Described | None) -> dict[str, Any]:
    if tensor is None:
        return {"shape": None, "dtype": "object"}
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
