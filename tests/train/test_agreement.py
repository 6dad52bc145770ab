"""The exchanges of a step on many ranks, counted in a process that is rank 0 of 512.

Real are the loop, the engine and the files of rank 0. The other ranks are torch's fake group, whose
collectives return at once: what they would wait for, and the network, is not in the times.
"""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from base.files import write_json
from tests.runs import make_run, on_ranks
from train import distributed, loop
from train.run.config import load_run
from train.run.directory import RunDirectory
from train.run.launch import Launch
from train.run_data import open_data
from train.running.agreement import Agreement

RANKS, STEPS = 512, 24
EXCHANGES = (
    *("all_reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor"),
    *("isend", "irecv", "batch_isend_irecv", "barrier", "send", "recv"),
    *("all_gather_object", "broadcast_object_list", "send_object_list", "recv_object_list"),
)


def count_exchanges(run_dir: str) -> None:
    """Worker: the exchanges of rank 0 in every step, by group, and the seconds of its flags."""
    exchanges: list[tuple[str, str]] = []
    seconds: list[float] = []

    def counted(name: str, exchange: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(exchange)
        def call(*arguments: Any, **named: Any) -> Any:
            of_control = named.get("group") is distributed._control[0]
            exchanges.append((name, "control" if of_control else "step"))
            return exchange(*arguments, **named)

        return call

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began_at = time.perf_counter()
            result = method(*arguments)
            seconds.append(time.perf_counter() - began_at)
            return result

        return call

    from train.megatron import data_parallel

    new_group = dist.new_group
    with ExitStack() as patches:

        def patch(owner: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(owner, name, value))

        # Collectives by buckets, as on GPUs: over gloo each is hundreds of messages.
        patch(data_parallel, "overlaps", lambda _: True)
        dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
        patch(dist, "new_group", lambda *a, **named: new_group(*a, **named | {"backend": "fake"}))
        directory = RunDirectory(Path(run_dir))
        run = load_run(directory.run_json)
        data = open_data(run, directory, verify_hashes=True)
        training = loop._Training(run, directory, data)
        training.begin(Launch())
        for name in EXCHANGES:
            patch(dist, name, counted(name, getattr(dist, name)))
        for name in ("flags", "reached"):
            patch(Agreement, name, timed(getattr(Agreement, name)))

        steps = []
        for _ in range(STEPS):
            exchanges.clear()
            training.step += 1
            training.train_step()
            steps.append({"exchanges": list(exchanges), "seconds": sum(seconds[-2:])})
        write_json(directory.path / "steps.json", steps)
        engine: Any = training.engine
        (buffer,) = engine._pipeline.model.buffers
        # So many ranks have padded buckets, each rank an equal stretch of whole cache lines.
        assert [bucket.grad_data.numel() % (1 << 16) for bucket in buffer.buckets] == [0]
        assert buffer.grad_data.numel() // RANKS % 128 == 0


def test_flags_of_512_ranks_add_no_exchange_to_a_step(tmp_path, inputs):
    make_run(
        tmp_path,
        **inputs,
        data={"sequence_length": 4},
        batch_size=RANKS,
        micro_batch_size=1,
        total_steps=STEPS + 1,
        save_steps=(STEPS + 1,),
        observe_every_steps=None,
    )
    on_ranks(1, count_exchanges, tmp_path)
    steps = json.loads((tmp_path / "steps.json").read_text())
    last = steps[STEPS // 2 :]
    # What all ranks wait for beside gradients and weights: the one sum of losses, norm and flags.
    sums = [sum(each == ["all_reduce", "step"] for each in step["exchanges"]) for step in last]
    assert sums == [1] * len(last)
    # A larger peak of memory asks for a maximum, which soon seldom happens.
    asked = [[name for name, group in step["exchanges"] if group == "control"] for step in last]
    assert sum(map(bool, asked)) <= 5
    # Of the least disturbed step: other processes of this machine take their time, too.
    assert min(step["seconds"] for step in last) < 1e-3


PEAKS = [[5, 5, 9, 9, 9], [4, 7, 7, 7, 8]]  # bytes of two ranks, by step


def agree(run_dir: str) -> None:
    """Worker, on both ranks: what is agreed on by step, when one rank raises a flag."""
    distributed.start()
    rank, rows = dist.get_rank(), []
    attempt = mock.Mock(successor=lambda: None)
    saver = mock.Mock(writing=False)
    agreement = Agreement(RunDirectory(Path(run_dir)), attempt, saver)
    for step, peak in enumerate(PEAKS[rank]):
        saver.writing = (rank, step) == (1, 2)
        stops = "SIGUSR1" if (rank, step) == (0, 3) else None
        with (
            mock.patch("train.running.agreement.peak_memory_bytes", lambda peak=peak: peak),
            mock.patch("base.stopping.requested", lambda _, stops=stops: stops),
        ):
            sums = torch.tensor(agreement.flags(None))
        dist.all_reduce(sums)
        writing = agreement.reached(step, sums.tolist())
        rows.append([agreement.memory_bytes, writing, agreement.stopping])
    write_json(Path(run_dir) / f"{rank}.json", rows)
    dist.destroy_process_group()


def test_the_maximum_of_every_step_and_flags_of_one_rank_reach_both(tmp_path):
    on_ranks(2, agree, tmp_path)
    expected = [[max(step), False, False] for step in zip(*PEAKS, strict=True)]
    expected[2][1] = True
    expected[3][2] = expected[4][2] = True  # asked once is asked
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected
