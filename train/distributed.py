"""The processes of one attempt: their device, their groups, and how they agree."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from base.gpus import near_cpus
from base.ranks import own_gpu

# Of a collective: until the first step is made, and always where ranks wait for each other's disk.
PATIENT = timedelta(minutes=30)

# One gloo group for flags and small objects: they never wait for a GPU stream.
_control: list[dist.ProcessGroup] = []


def start() -> torch.device:
    """Join the process group, NCCL on GPUs and gloo on CPUs; return this rank's device.

    Raises:
        UserError: more processes on this node than GPUs.
    """
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = own_gpu()
        _bind_to_numa_node(device)
    if not dist.is_initialized():
        # A process without torchrun is a world of one; port 0 lets the system choose a free one.
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
        for key, value in alone.items():
            os.environ.setdefault(key, value)
        if device.type == "cuda":  # with its device NCCL connects at once: a bad GPU shows here
            dist.init_process_group("nccl", timeout=PATIENT, device_id=device)
        else:
            dist.init_process_group("gloo", timeout=PATIENT)
    control = dist.new_group(backend="gloo", timeout=PATIENT)
    assert isinstance(control, dist.ProcessGroup)  # of all ranks, so that this one is a member
    _control[:] = [control]
    return device


def _bind_to_numa_node(device: torch.device) -> None:
    """Keep this process, and its later threads, on the CPUs beside its GPU.

    That is what torchrun --numa-binding does by numactl, which few containers have. CPUs that the
    user or SLURM has not given stay out, and where too few are left nothing changes.
    """
    allowed = os.sched_getaffinity(0)
    near = allowed & near_cpus(str(torch.cuda.get_device_properties(device).uuid))
    # Fewer CPUs than an even share of those allowed would slow this rank down.
    if len(near) >= len(allowed) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 0:
        os.sched_setaffinity(0, near)


def limit_collectives(seconds: float) -> None:
    """Set the timeout of every group that this rank is in, except that of flags and objects."""
    for group in list(distributed_c10d._world.pg_map):
        if group is not _control[0]:
            dist.set_timeout(timedelta(seconds=seconds), group)


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


def sent_to_rank_zero[T](value: T) -> list[T]:
    """Return every rank's value, of tensors on the CPU, by rank, on rank 0; nothing elsewhere."""
    if dist.get_rank() != 0:
        dist.send_object_list([value], dst=0, group=_control[0])
        return []
    parts = [value]
    for rank in range(1, dist.get_world_size()):
        received: list[Any] = [None]
        dist.recv_object_list(received, src=rank, group=_control[0])
        parts += received
    return parts


def numbers_on_rank_zero(values: Sequence[float]) -> list[list[float]]:
    """Return every rank's numbers, by rank, on rank 0; nothing elsewhere.

    Each rank sends one message and continues, where `gathered` goes around a ring twice.
    """
    row = torch.tensor(values, dtype=torch.float64, device="cpu")
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    here = dist.get_rank() == 0
    dist.gather(row, rows if here else None, dst=0, group=_control[0])
    return [row.tolist() for row in rows] if here else []


def with_flags(sums: Tensor, flags: Sequence[float]) -> Tensor:
    """Return fp64 sums of this rank, and its flags after them, for one reduction over all."""
    row = torch.tensor(flags, dtype=sums.dtype, device="cpu")
    if sums.is_cuda:
        row = row.pin_memory()  # only then the host does not wait for the GPU here
    return torch.cat([sums, row.to(sums.device, non_blocking=True)])


def largest(values: list[float]) -> list[float]:
    """Return the elementwise maximum over all ranks, by a ring of 2 (ranks - 1) messages."""
    # In fp64 numbers of bytes are exact.
    tensor = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=_control[0])
    return list(tensor.tolist())
