"""Sharded checkpoints in three parts: plan and copy (collective), write (alone), seal (collective).

megatron-core 0.16 writes every save through forked processes and a manager process, and waits
forever when one of them is killed. Here the rank writes its own files, in the thread that calls it.
This file uses private members of megatron-core: look here first when its version changes.
"""

import queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from train.run.dcp_metadata import METADATA
from train.snapshot_memory import SnapshotMemory

# Begins the names of the files of optimizer state and, in the state dict, its keys: files of their
# own, so that an export hashes and reads those of the weights only.
OPTIMIZER = "optimizer"


class _Plan(TorchDistSaveShardedStrategy):
    """mcore's torch_dist format, a file of weights and one of state per rank, not yet written."""

    def __init__(self, state: dict[str, Any], directory: Path) -> None:
        super().__init__("torch_dist", 1, thread_count=2, separation_hint=OPTIMIZER)
        filesystem_async._results_queue = queue.Queue()  # or mcore starts a manager process for it
        self.async_save(state, directory)

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, planned: Any
    ) -> AsyncRequest:
        self.writer, self.planned = writer, planned
        return AsyncRequest(None, (), [])


class ShardedSnapshot:
    """A sharded state dict as it is now: `train.engine.Snapshot`."""

    def __init__(self, state: dict[str, Any], directory: Path, memory: SnapshotMemory) -> None:
        sharded, self._common = save_preprocess(state)
        entries = [
            entry
            for entry in nested_values(sharded)
            if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id)
        ]
        self._copies = memory.copied([entry.data for entry in entries])
        for entry, copy in zip(entries, self._copies.tensors, strict=True):
            entry.data = copy
        plan = _Plan(sharded, directory)
        self._directory, self._planned, self._writer = directory, plan.planned, plan.writer
        self._writer.results_queue = queue.Queue()
        self._config = CheckpointingConfig(plan.backend, plan.version)

    def write(self) -> list[str]:
        """Write and sync this rank's files."""
        self._copies.wait()
        results: dict[int, Any] = {}
        for index, bucket in enumerate(self._writer.write_buckets):
            outcomes: queue.Queue = queue.Queue()
            pending: queue.Queue = queue.Queue()
            pending.put(index)
            transforms = [self._writer.transforms]
            FileSystemWriterAsync.write_preloaded_data(
                transforms, index, bucket, outcomes, pending, use_fsync=True
            )
            _, outcome = outcomes.get()
            if isinstance(outcome, Exception):
                raise outcome
            results[index] = outcome
        self._writer.results_queue.put(results)
        self._copies.release()
        return [name for _, name, _ in self._writer.write_buckets]

    def seal(self) -> list[str]:
        """Write the shared files, once all have written; rank 0 raises if it cannot."""
        save_state_dict_async_finalize(*self._planned)
        if dist.get_rank() != 0:
            return []
        torch.save(self._common, self._directory / COMMON_STATE_FNAME)
        save_config(self._config, str(self._directory))
        return [METADATA, COMMON_STATE_FNAME, CONFIG_FNAME]
