"""Sharded checkpoints in three parts: plan and copy (collective), write (alone), seal (collective).

The files are those of megatron-core's torch_dist format, which `dist_checkpointing.load` reads.
megatron-core's own `save` starts a process for the results and hides what went wrong with a file.
Here torch's planner and writer do it, in the thread that calls.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import mcore_to_pyt_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult

from train.distributed import sent_to_rank_zero
from train.run.dcp_metadata import METADATA
from train.snapshot_memory import SnapshotMemory

# Begins the names of the files of optimizer state and, in the state dict, its keys: files of their
# own, so that an export hashes and reads those of the weights only.
OPTIMIZER = "optimizer"


class ShardedSnapshot:
    """A sharded state dict as it is now: `train.engine.Snapshot`."""

    def __init__(self, state: dict[str, Any], directory: Path, memory: SnapshotMemory) -> None:
        # The common part is what is not sharded, such as the number of steps.
        sharded, self._common = save_preprocess(state)
        entries: list[ShardedTensor] = [
            entry for entry in nested_values(sharded) if is_main_replica(entry.replica_id)
        ]
        self._copies = memory.copied([entry.data for entry in entries])
        parts = defaultdict(list)
        for entry, copy in zip(entries, self._copies.tensors, strict=True):
            entry.data = copy
            parts[entry.key].append(entry)

        self._planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(mcore_to_pyt_state_dict(parts))
        self._plan = self._planner.create_local_plan()
        # The tensors are on the CPU: there is nothing to copy ahead.
        self._writer = FileSystemWriter(directory, per_thread_copy_ahead=0)
        self._directory = directory
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
        parts = sent_to_rank_zero((self._plan, self._results))
        if dist.get_rank() != 0:
            return []
        _, metadata = self._planner.create_global_plan([plan for plan, _ in parts])
        self._writer.finish(metadata, [results for _, results in parts])
        # A file of its own, which torch opens with `weights_only`. megatron-core 0.19 puts it among
        # the shards, where torch opens any pickle.
        torch.save(self._common, self._directory / COMMON_STATE_FNAME)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._directory))
        return [METADATA, COMMON_STATE_FNAME, CONFIG_FNAME]
