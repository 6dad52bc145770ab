"""Writing a sharded checkpoint in the training process.

megatron-core 0.16 writes every save through forked processes and a manager process, and waits for ever when one of them
is killed. A save here is synchronous, so it needs neither.
"""

import queue
from functools import partial
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy


class InProcessSave(TorchDistSaveShardedStrategy):
    """mcore's torch_dist format, one file per rank, written and synced by the rank itself."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)
        filesystem_async._results_queue = queue.Queue()  # in place of a queue in a manager process

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, plan: Any) -> AsyncRequest:
        request = super()._get_save_and_finalize_callbacks(writer, plan)
        if request.async_fn is None:  # every tensor of this rank is written by another replica
            return request
        transforms = request.async_fn.args[0]
        return request._replace(async_fn=partial(_write, transforms))


def _write(transforms: list, _rank: int, buckets: list, results: queue.Queue) -> None:
    """Writes the planned buckets; hands the write results, or the first exception, to `results`."""
    written: dict[int, Any] = {}
    for index, bucket in enumerate(buckets):
        outcomes: queue.Queue = queue.Queue()
        pending: queue.Queue = queue.Queue()
        pending.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, outcomes, pending, use_fsync=True)
        _, outcome = outcomes.get()
        if isinstance(outcome, Exception):
            results.put(outcome)
            return
        written[index] = outcome
    results.put(written)
