"""Programs that the checks of several GPUs start on ranks: `-m tests.gpu.on_ranks NAME WORDS`."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from train.distributed import gathered, largest, limit_collectives, start
from train.run.config import load_run
from train.run.directory import RunDirectory
from train.run.parallel import ParallelConfig

ROUNDS = 5


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def collectives(out: str, megabytes: str) -> None:
    """Write whether the collectives of training are right, and how long they take."""
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    began_at = time.perf_counter()
    device = start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_all = ranks * (ranks + 1) // 2
    values = torch.full((int(megabytes) << 18,), float(rank + 1), device=device)
    dist.all_reduce(values)
    wrong = {"sum": float((values != of_all).sum())}
    started = time.perf_counter() - began_at

    values.fill_(1.0)
    _wait(device)
    began_at = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    _wait(device)
    seconds = (time.perf_counter() - began_at) / ROUNDS
    wrong["sums in a row"] = float((values != ranks**ROUNDS).sum())

    # As the distributed optimizer does: gradients are summed into shares, weights gathered.
    whole = torch.arange(16 * ranks, device=device, dtype=torch.float32)
    share = torch.empty(16, device=device)
    dist.reduce_scatter_tensor(share, whole)
    mine = ranks * whole[16 * rank : 16 * (rank + 1)]
    wrong["shares of a sum"] = float((share != mine).sum())
    together = torch.empty_like(whole)
    dist.all_gather_into_tensor(together, share)
    wrong["shares brought together"] = float((together != ranks * whole).sum())

    # As stages of a pipeline do: to the next rank, and from the one before.
    received = torch.empty(16, device=device)
    there, before = (rank + 1) % ranks, (rank - 1) % ranks
    sends = [dist.P2POp(dist.isend, share, there), dist.P2POp(dist.irecv, received, before)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    expected = ranks * whole[16 * before : 16 * (before + 1)]
    wrong["sent to the next rank"] = float((received != expected).sum())

    began_at = time.perf_counter()
    flags = largest([float(rank), 0.0])
    of_flags = time.perf_counter() - began_at
    wrong["flags"] = float(flags != [ranks - 1.0, 0.0] or gathered(rank) != list(range(ranks)))
    of_ranks = gathered(wrong)
    if rank == 0:
        most = {name: max(each[name] for each in of_ranks) for name in wrong}
        times = {"started": started, "seconds": seconds, "flags": of_flags}
        content = {"backend": dist.get_backend(), "wrong": most} | times
        Path(out).write_text(json.dumps(content))
    dist.destroy_process_group()


def reloaded(run_dir: str, checkpoint: str, out: str, *layouts: str) -> None:
    """Load a checkpoint at each layout, TENSORxPIPELINE, and save all state again below `out`."""
    from megatron.core import parallel_state

    from train.megatron.engine import MegatronEngine

    run, device = load_run(RunDirectory(Path(run_dir)).run_json), start()
    for layout in layouts:
        tensor, pipeline = map(int, layout.split("x"))
        parallel = ParallelConfig(tensor=tensor, pipeline=pipeline)
        engine = MegatronEngine(run.model_copy(update={"parallel": parallel}), device)
        engine.load(Path(checkpoint))
        directory = Path(out) / layout
        directory.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        snapshot = engine.snapshot(directory, weights_only=False)
        snapshot.write()
        dist.barrier()
        snapshot.seal()
        dist.barrier()
        parallel_state.destroy_model_parallel()
    engine.close()


def unjoined(out: str, seconds: str) -> None:
    """Begin a collective that the last rank never joins, and that may take so long.

    Rank 0 writes the backend to `out` as it begins.
    """
    device = start()
    values = torch.ones(1024, device=device)
    dist.all_reduce(values)
    _wait(device)
    limit_collectives(float(seconds))
    rank = dist.get_rank()
    if rank == dist.get_world_size() - 1:
        time.sleep(10 * float(seconds) + 60)
    if rank == 0:
        Path(out).write_text(dist.get_backend())
    dist.all_reduce(values)
    _wait(device)


PROGRAMS = {program.__name__: program for program in (collectives, reloaded, unjoined)}

if __name__ == "__main__":
    name, *words = sys.argv[1:]
    PROGRAMS[name](*words)
