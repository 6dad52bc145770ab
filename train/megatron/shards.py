"""Sharded checkpoints in three parts: plan and copy (collective), write (alone), seal (collective).

The files are those of megatron-core's torch_dist format, which `dist_checkpointing.load` reads.
megatron-core's own `save` starts a process for the results and hides what went wrong with a file.
Here torch's planner and writer do it, in the thread that calls. Of a box a rank reads only what it
needs, where torch's reader reads all of it.
"""

import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import mcore_to_pyt_state_dict
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from train.distributed import sent_to_rank_zero
from train.run.dcp_boxes import find_numbers
from train.run.dcp_metadata import METADATA
from train.snapshot_memory import SnapshotMemory

# Begins the names of the files of optimizer state and, in the state dict, its keys: files of their
# own, so that an export hashes and reads those of the weights only.
OPTIMIZER = "optimizer"


class ShardedSnapshot:
    """A sharded state dict as it is now: `train.engine.Snapshot`.

    Args:
        state: to be saved.
        directory: of the checkpoint.
        memory: for the copies.
        known: one list for all snapshots of the same tensors; the first puts in what rank 0 made
            of all ranks' plans, for 7B on 64 ranks in 5 s. No layout changes within an attempt.
    """

    def __init__(
        self,
        state: dict[str, Any],
        directory: Path,
        memory: SnapshotMemory,
        known: list[Metadata | None],
    ) -> None:
        # The common part is what is not sharded, such as the number of steps.
        sharded, self._common = save_preprocess(state)
        entries: list[ShardedTensor] = [
            entry for entry in nested_values(sharded) if is_main_replica(entry.replica_id)
        ]
        self._copies = memory.copied([entry.data for entry in entries])
        for entry, copy in zip(entries, self._copies.tensors, strict=True):
            entry.data = copy

        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(mcore_to_pyt_state_dict(_by_key(entries)))
        self._plan = self._planner.create_local_plan()
        # The tensors are on the CPU: there is nothing to copy ahead.
        self._writer = FileSystemWriter(directory, per_thread_copy_ahead=0)
        self._directory, self._known = directory, known
        self._results: list[WriteResult] = []

    def write(self) -> list[str]:
        """Write and sync this rank's files."""
        self._copies.wait()
        self._write_items("")
        self._write_items(OPTIMIZER)
        self._copies.release()
        return sorted({result.storage_data.relative_path for result in self._results})

    def _write_items(self, kind: str) -> None:
        """Write a file of this rank's optimizer state, or of its weights."""
        items = [
            item
            for item in self._plan.items
            if item.index.fqn.startswith(OPTIMIZER) == (kind == OPTIMIZER)
        ]
        if items:
            # Planned alone, every rank would get the same file names: its number keeps them apart.
            (plan,) = self._writer.prepare_global_plan([replace(self._plan, items=items)])
            name = replace(plan.storage_data, prefix=f"{kind}__{dist.get_rank()}_")
            written = self._writer.write_data(replace(plan, storage_data=name), self._planner)
            self._results += written.value()

    def seal(self) -> list[str]:
        """Write the shared files, once all have written; rank 0 raises if it cannot."""
        parts = sent_to_rank_zero(([] if self._known else [self._plan], self._results))
        if not self._known:
            plans = [plan for planned, _ in parts for plan in planned]
            self._known.append(self._planner.create_global_plan(plans)[1] if plans else None)
        (metadata,) = self._known
        if metadata is None:  # on every rank but 0
            return []
        self._writer.finish(metadata, [results for _, results in parts])
        # A file of its own, which torch opens with `weights_only`. megatron-core 0.19 puts it among
        # the shards, where torch opens any pickle.
        torch.save(self._common, self._directory / COMMON_STATE_FNAME)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._directory))
        return [METADATA, COMMON_STATE_FNAME, CONFIG_FNAME]


def read_boxes(entries: Iterable[ShardedTensor], directory: Path, metadata: Metadata) -> None:
    """Fill sharded tensors, of any layout, from a checkpoint, whose metadata was read.

    Raises:
        UnpicklingError: a file holds a pickle of more than numbers.
    """
    with warnings.catch_warnings():
        # Every rank reads for itself, on purpose.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(
            mcore_to_pyt_state_dict(_by_key(entries), is_loading=True),
            storage_reader=_BoxReader(directory, metadata),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )


def shapes_of(entries: Iterable[ShardedTensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of the whole tensor by key."""
    return {entry.key: tuple(entry.global_shape) for entry in entries}


def read_common(directory: Path) -> dict[str, Any]:
    """Return what is not sharded."""
    common: dict[str, Any] = torch.load(directory / COMMON_STATE_FNAME, weights_only=True)
    return common


class _BoxReader(FileSystemReader):
    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._directory, self._metadata = directory, metadata

    def read_metadata(self) -> Metadata:
        """Return the metadata that was read without running code from the file."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a rank needs, file after file."""

        def place(item: ReadItem) -> tuple[str, int]:
            storage = self.storage_data[item.storage_index]
            return storage.relative_path, storage.offset

        for item in sorted(plan.items, key=place):
            target = planner.resolve_tensor(item)
            target.copy_(self._read(item))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, item: ReadItem) -> Tensor:
        """Return a part of a box, by one read from its first number to its last."""
        storage = self.storage_data[item.storage_index]
        path = self._directory / storage.relative_path
        box, first_byte = find_numbers(path, storage.offset, storage.length)
        strides, size = box.stride(), box.element_size()
        first = sum(at * stride for at, stride in zip(item.storage_offsets, strides, strict=True))
        last = sum((n - 1) * stride for n, stride in zip(item.lengths, strides, strict=True))
        read = np.fromfile(path, np.uint8, (last + 1) * size, offset=first_byte + first * size)
        return torch.from_numpy(read).view(box.dtype).as_strided(item.lengths, strides)


def _by_key(entries: Iterable[ShardedTensor]) -> dict[str, list[ShardedTensor]]:
    parts = defaultdict(list)
    for entry in entries:
        parts[entry.key].append(entry)
    return parts
