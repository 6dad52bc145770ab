"""The processes of one attempt: their device, their groups, and how they agree."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from base.errors import UserError

# One gloo group for flags and small objects: they never wait for a GPU stream.
_control: list[dist.ProcessGroup] = []


def start() -> torch.device:
    """Join the process group, NCCL on GPUs and gloo on CPUs; return this rank's device.

    Raises:
        UserError: more processes on this node than GPUs.
    """
    cuda = torch.cuda.is_available()
    if cuda:
        local_rank, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if devices == 1:  # SLURM with --gpus-per-task=1: every rank sees its own device as number 0
            local_rank = 0 if "SLURM_LOCALID" in os.environ else local_rank
        if local_rank >= devices:
            raise UserError(
                f"local rank {local_rank} has no GPU of its own, there are {devices}; start fewer"
                " processes per node, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        for key, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "0",
        }.items():
            os.environ.setdefault(key, value)
        dist.init_process_group("nccl" if cuda else "gloo")
    _control[:] = [dist.new_group(backend="gloo")]
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


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
    """Return every rank's tensors, by rank, on rank 0 and on the CPU; nothing elsewhere.

    Each is sent from its rank to rank 0 alone; every rank receives names and shapes.
    """
    described = gathered({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    if dist.get_rank() != 0:
        for tensor in tensors.values():
            dist.send(tensor.cpu().contiguous(), dst=0, group=_control[0])
        return []
    parts = [{name: tensor.cpu() for name, tensor in tensors.items()}]
    for rank, names in enumerate(described[1:], start=1):
        part = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in names.items()}
        for tensor in part.values():
            dist.recv(tensor, src=rank, group=_control[0])
        parts.append(part)
    return parts


def largest(values: list[float]) -> list[float]:
    """Return the elementwise maximum over all ranks: so they agree on flags."""
    tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=_control[0])
    return list(tensor.tolist())
