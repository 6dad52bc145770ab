"""The processes of one attempt: their device, their groups, and how they agree."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from base.ranks import own_gpu

# One gloo group for flags and small objects: they never wait for a GPU stream.
_control: list[dist.ProcessGroup] = []


def start() -> torch.device:
    """Join the process group, NCCL on GPUs and gloo on CPUs; return this rank's device.

    Raises:
        UserError: more processes on this node than GPUs.
    """
    device = own_gpu() if torch.cuda.is_available() else torch.device("cpu")
    if not dist.is_initialized():
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        for key, value in alone.items():
            os.environ.setdefault(key, value)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    _control[:] = [dist.new_group(backend="gloo")]
    return device


def from_rank_zero(value: Any) -> Any:
    """Return rank 0's value, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_control[0])
    return values[0]


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, by rank, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=_control[0])
    return values


def sent_to_rank_zero(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return every rank's tensors, which are on the CPU, by rank, on rank 0; nothing elsewhere."""
    if dist.get_rank() != 0:
        dist.send_object_list([tensors], dst=0, group=_control[0])
        return []
    parts = [tensors]
    for rank in range(1, dist.get_world_size()):
        received: list[Any] = [None]
        dist.recv_object_list(received, src=rank, group=_control[0])
        parts += received
    return parts


def largest(values: list[float]) -> list[float]:
    """Return the elementwise maximum over all ranks: so they agree on flags."""
    tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=_control[0])
    return list(tensor.tolist())
