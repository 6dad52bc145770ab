"""One rank of a large job in a process of its own: the engine over tensors without memory."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from train.run.config import RunConfig


@contextmanager
def simulated_rank(run: RunConfig, rank: int, ranks: int) -> Iterator[Any]:
    """Yield the megatron engine of one of so many ranks, with the buckets of GPUs.

    Tensors are fake, and no collective does anything. One after another in a process.
    """
    from megatron.core import parallel_state

    from train.megatron.engine import MegatronEngine

    store = FakeStore()  # type: ignore[no-untyped-call]
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=store)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        stack.callback(parallel_state.destroy_model_parallel)
        # Moved to its device, a fake parameter could not keep its identity.
        stack.enter_context(mock.patch("torch.nn.Module.to", lambda module, _: module))
        stack.enter_context(mock.patch("train.megatron.data_parallel.overlaps", return_value=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield MegatronEngine(run, torch.device("cpu"))
