"""Ranks that are killed or hang, on several GPUs: what is saved stays whole, another layout resumes
it with the same state, and the watchdog names the rank.
"""

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ckpt_tools.checkpoint import verified_record
from ckpt_tools.formats.megatron_shards import ShardedTensors
from tests.gpu.figures import CheckedFigure, apart
from tests.gpu.launch import Started, succeed
from tests.gpu.several import (
    APART,
    BOTH,
    KILLED_ONE,
    KILLED_STEPS,
    KINDS,
    MOST_SECONDS,
    PLAIN,
    micro_batch,
    on_all,
    on_one,
    parallel,
    prepared,
    rows_of,
)
from tests.gpu.workbench import Workbench
from train.checkpoints.saving import UNFINISHED
from train.run.directory import RunDirectory
from train.run.environment import attempts
from train.run.status import read_status
from train.running.watchdog import Heartbeat

EVERY_SECONDS = 0.001  # a condition is looked at: a save may take few milliseconds
HUNG_STEPS = 2000  # more than are made until a rank is stopped
HANG_SECONDS = 12.0
TIMEOUT_SECONDS = 5.0  # of a collective
ATTEMPTS = 5  # to kill a rank in a save
END_SECONDS = 90.0  # torchrun leaves 30 s to ranks that it ends


def wait_until(condition: Callable[[], object], what: str, started: Started) -> None:
    """Return once a condition holds; RuntimeError if the command ends first, or after minutes."""
    end = time.monotonic() + MOST_SECONDS
    while not condition():
        if started.poll() is not None and not condition():
            errors = started.communicate(MOST_SECONDS)[1][-2000:]
            raise RuntimeError(f"{what}: the command ended first: {errors}")
        if time.monotonic() > end:
            started.kill()
            raise RuntimeError(f"{what}: not within {MOST_SECONDS:.0f} s")
        time.sleep(EVERY_SECONDS)


def process_of(directory: RunDirectory, rank: int) -> int | None:
    """Return the process of a rank by its heartbeat, None before the first."""
    with contextlib.suppress(OSError, ValueError):
        return Heartbeat(*json.loads(directory.heartbeat(rank).read_text())).pid
    return None


def start_watched(workbench: Workbench, directory: RunDirectory) -> Started:
    """Start a run on all GPUs, whose ranks soon write heartbeats of their own."""
    # Those of an attempt that was killed name processes that may be anybody's by now.
    shutil.rmtree(directory.watch, ignore_errors=True)
    words = ("train", "run", str(directory.path), "--device", workbench.device)
    return workbench.start(workbench.gpus, *words, "--hang-seconds", str(HANG_SECONDS))


def signal_last(
    workbench: Workbench,
    directory: RunDirectory,
    number: signal.Signals,
    when: Callable[[], object],
    started: Started,
) -> int:
    """Send a signal to the last rank as soon as a condition holds; return its process."""
    last = workbench.gpus - 1
    wait_until(lambda: process_of(directory, last), "a heartbeat", started)
    pid = process_of(directory, last)
    assert pid
    wait_until(when, "the moment of a signal", started)
    os.kill(pid, number)
    return pid


def killed(workbench: Workbench) -> list[CheckedFigure]:
    """A run whose last rank is killed in a step, then in a save, and which is then left to its end.

    Each attempt has another layout. Its losses are those of a run that nobody killed.
    """
    directory = RunDirectory(workbench.work / "killed")
    run = KILLED_ONE
    (one,) = on_one(workbench, run)

    def begin(kind: str) -> Started:
        layout = parallel(workbench, kind)
        micro = micro_batch(workbench, layout)
        prepared(
            directory.path,
            workbench,
            run.settings | {"parallel": layout, "micro_batch_size": micro},
        )
        return start_watched(workbench, directory)

    # In a step: the other ranks wait in a collective for the one that is gone.
    started = begin("tensor")
    signal_last(workbench, directory, signal.SIGKILL, directory.complete_restarts, started)
    ended = seconds_to_end(started)
    saved = [newest(directory)]

    # In a save. A look may come too late; then the run is started again.
    for _ in range(ATTEMPTS):
        attempt = len(attempts(directory.environment_json)) + 1
        started = begin("pipeline")
        signal_last(
            workbench, directory, signal.SIGKILL, partial(saving, directory, attempt), started
        )
        started.kill()
        saved.append(newest(directory))
        if saving(directory, attempt):
            break
    else:
        raise RuntimeError(f"no rank was killed in a save, of {ATTEMPTS}")

    succeed(begin("data"), MOST_SECONDS)
    resumed = [entry["resumed_from_step"] for entry in attempts(directory.environment_json)]
    # Steps that two attempts have made are compared twice.
    rows, expected = rows_of(directory.path), {row["step"]: row["loss"] for row in rows_of(one)}
    moved = apart([row["loss"] for row in rows], [expected[row["step"]] for row in rows])
    return [
        CheckedFigure("rank killed: until all ended", ended, "s", most=END_SECONDS),
        CheckedFigure(
            "rank killed in a step and in a save: attempts not resumed from the newest",
            sum(a != b for a, b in zip(resumed, [None, *saved], strict=True)),
            "",
            most=0.0,
        ),
        CheckedFigure(
            f"its losses of {KILLED_STEPS} steps at three layouts, against one GPU never killed",
            moved,
            "nats/token, largest difference",
            most=APART["fp32"][0],
        ),
    ]


def saving(directory: RunDirectory, attempt: int) -> bool:
    """Return whether an attempt has begun a save that is not complete."""
    return any(directory.restarts.glob(f"{UNFINISHED}*.attempt{attempt}"))


def newest(directory: RunDirectory) -> int:
    """Return the step of the newest restart checkpoint; UserError if a complete one is damaged."""
    steps = directory.complete_restarts()
    for step in steps:
        verified_record(directory.restart(step))
    return max(steps)


def seconds_to_end(started: Started) -> float:
    """Return the seconds until a command ends by itself, infinite where it does not."""
    began_at = time.monotonic()
    try:
        started.communicate(END_SECONDS)
    except subprocess.TimeoutExpired:
        started.kill()
        return math.inf
    return time.monotonic() - began_at


def hung(workbench: Workbench) -> list[CheckedFigure]:
    """The last rank is stopped within a step: the watchdog of the others ends them and names it."""
    directory = RunDirectory(workbench.work / "hung")
    micro = micro_batch(workbench, parallel(workbench, "data"))
    settings: dict[str, Any] = {
        "steps": HUNG_STEPS,
        "save_steps": (HUNG_STEPS,),
        "micro_batch_size": micro,
    }
    prepared(directory.path, workbench, settings)
    started = start_watched(workbench, directory)
    pid = signal_last(
        workbench, directory, signal.SIGSTOP, lambda: len(rows_of(directory.path)) > 2, started
    )
    began_at = time.monotonic()
    wait_until(directory.status_json.exists, "a verdict", started)
    seconds = time.monotonic() - began_at
    status = read_status(directory)
    assert status
    # torchrun leaves a stopped process half a minute before it kills it.
    os.kill(pid, signal.SIGKILL)
    ended = seconds_to_end(started)
    named = f"no sign of life of rank {workbench.gpus - 1} on " in status.reason
    of_process = f"(pid {pid})" in status.reason
    return [
        CheckedFigure(
            f"rank stopped: named after {HANG_SECONDS:.0f} s without a step",
            float(named and of_process and status.status == "failed"),
            "1 is right",
            least=1.0,
            note=status.reason,
        ),
        CheckedFigure("rank stopped: until it is named", seconds, "s", most=2 * HANG_SECONDS),
        CheckedFigure("rank stopped: until the others ended", ended, "s", most=END_SECONDS),
    ]


def unjoined(workbench: Workbench) -> list[CheckedFigure]:
    """A collective that one rank does not join ends at its timeout, which training has set."""
    out, traces = workbench.work / "began", workbench.work / "trace_"
    variables = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(traces),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    words = ("tests.gpu.on_ranks", "unjoined", str(out), str(TIMEOUT_SECONDS))
    started = workbench.start(workbench.gpus, *words, variables=variables)
    wait_until(out.exists, "a collective", started)
    seconds = seconds_to_end(started)
    what = f"collective that a rank does not join, timeout {TIMEOUT_SECONDS:.0f} s"
    figures = [
        CheckedFigure(
            f"{what}: until all ended", seconds, "s", least=TIMEOUT_SECONDS / 2, most=END_SECONDS
        ),
        CheckedFigure(f"{what}: exit code", float(started.poll() or 0), "", least=1.0),
    ]
    if out.read_text() == "nccl":  # which alone keeps one
        count = len(list(traces.parent.glob(f"{traces.name}*")))
        figures.append(CheckedFigure(f"{what}: flight recorders", count, "ranks", least=1.0))
    return figures


def reloaded(workbench: Workbench) -> list[CheckedFigure]:
    """All state that was saved at a layout, loaded at others and saved again: the same bits."""
    run = on_all(workbench, "tensor", PLAIN[1])
    step = workbench.sizes.compared_steps
    checkpoint = RunDirectory(run).checkpoint(step)
    kinds = {
        kind: parallel(workbench, kind) for kind in KINDS if kind != BOTH or workbench.gpus > 2
    }
    layouts = [f"{layout.tensor}x{layout.pipeline}" for layout in kinds.values()]
    words = ("tests.gpu.on_ranks", "reloaded", str(run), str(checkpoint), str(workbench.work))
    succeed(workbench.start(workbench.gpus, *words, *layouts), MOST_SECONDS)
    saved = ShardedTensors(checkpoint)
    figures = []
    for kind, layout in zip(kinds, layouts, strict=True):
        again = ShardedTensors(workbench.work / layout)
        names = saved.tensors.keys() | again.tensors.keys()
        wrong = sum(not same(saved, again, name) for name in names)
        what = f"state of tensor parallel ranks, loaded by {kind} parallel ones and saved again"
        note = f"{len(names)} tensors: weights and states of the optimizer"
        figures.append(CheckedFigure(f"{what}: tensors apart", wrong, "", most=0.0, note=note))

    # Ranks that share the data share what is written, too.
    written = [
        sum(path.stat().st_size for path in (workbench.work / layouts[0]).glob(f"__{rank}_*"))
        for rank in range(workbench.gpus)
    ]
    most = max(written) * len(written) / sum(written)
    name = f"{workbench.gpus} data parallel ranks save: bytes of the largest over the mean"
    note = "rows are written whole, and 6M parameters have few; gathered on rank 0 it is the ranks"
    return [*figures, CheckedFigure(name, most, "x", most=1.2, note=note)]


def same(saved: ShardedTensors, again: ShardedTensors, name: str) -> bool:
    """Return whether two checkpoints hold the same bits of a tensor."""
    if saved.tensors.get(name) != again.tensors.get(name):
        return False
    rows = saved.tensors[name].shape[0]
    return torch.equal(saved.read(name, 0, rows), again.read(name, 0, rows))
