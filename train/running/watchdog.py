"""A watchdog on the age of the last step: it ends an attempt that hangs and names the rank.

It is a thread of every rank, so that every start of a run has it: by hand, by a study, by SLURM.
`train.loop` reports the phase of its rank. The thread writes it to RUN/watch, a heartbeat, and once
its own rank makes no step it reads those of all ranks. A rank without new heartbeats is stopped, or
its node is lost, also while the others save; else the rank that is farthest back delays them. The
lowest living rank prints it, and all living ranks exit with EX_TEMPFAIL; torchrun then kills the
rest.
The run is resumed by `study.pipeline.runner`, by `slurm.job`, or by the user's same command. (Not
by torchrun --max-restarts: its new ranks find the old ones' addresses in its store, pytorch issue
135712.)
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from enum import IntEnum
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

from train.checkpoints.attempt import Attempt
from train.distributed import limit_collectives
from train.run.directory import RunDirectory
from train.run.launch import HUNG

USUAL_STEPS = 10  # of time without a step, and at least `hang_seconds`
BEATS = 30  # of a heart in `hang_seconds`
COLLECTIVES_LATER = 1.2  # they time out after the verdict, which alone names a rank
STILL_BEATS = 2  # a rank that misses so many is not alive
SAVING_BEATS = BEATS // 2  # the same in a save: what it writes may hold up the file of the beats
SPEAKING_SECONDS = 5.0  # that the others leave to the rank that speaks: their exit would end it
LEAVING_SECONDS = 60.0  # for what is written at the end: the disk may be what hangs
NAMED_RANKS = 4


class LoopPhase(IntEnum):
    """The parts of a step, in order. The last may take as long as it needs."""

    COMPUTE, READ, AGREE, SAVE = range(4)


WORDS = {
    LoopPhase.COMPUTE: "computes step {}",
    LoopPhase.READ: "reads its batch after step {}",
    LoopPhase.AGREE: "sums losses and flags over ranks in step {}",
    LoopPhase.SAVE: "logs, evaluates or saves after step {}",
}


class Heartbeat(NamedTuple):
    """A heartbeat of a rank, and the position of its training."""

    rank: int
    host: str = "an unknown host"
    pid: int = 0
    beat: int = 0
    step: int = 0
    phase: int = LoopPhase.COMPUTE

    @property
    def position(self) -> tuple[int, int]:
        """Step and phase; a rank that is farther back has a smaller one."""
        return self.step, self.phase

    def __str__(self) -> str:
        """Return the rank in words."""
        return f"rank {self.rank} on {self.host} (pid {self.pid})"


def diagnosis(living: list[Heartbeat], dead: list[Heartbeat]) -> str:
    """Return which ranks delay the others."""
    if dead:
        return f"no sign of life of {_named(dead)}"
    position = min(beat.position for beat in living)
    slowest = [beat for beat in living if beat.position == position]
    activity = WORDS[LoopPhase(position[1])].format(position[0])
    if len(slowest) == len(living) > 1:
        return f"every rank {activity}: a collective or a kernel does not end"
    return f"{_named(slowest)} still {activity}"


def _named(beats: list[Heartbeat]) -> str:
    more = f" and {len(beats) - NAMED_RANKS} more" if len(beats) > NAMED_RANKS else ""
    return f"{', '.join(map(str, beats[:NAMED_RANKS]))}{more}"


class Watchdog:
    """The watchdog of one rank."""

    def __init__(self, directory: RunDirectory, attempt: Attempt, hang_seconds: float) -> None:
        self._directory, self._attempt, self._hang_seconds = directory, attempt, hang_seconds
        self._rank, self._beats = dist.get_rank(), 0
        self._position = (0, LoopPhase.SAVE)
        self._began_at = 0.0
        self._step_seconds: deque[float] = deque(maxlen=50)
        self._over = threading.Event()
        directory.watch.mkdir(exist_ok=True)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def enter(self, step: int, phase: LoopPhase) -> None:
        """Note the phase that this rank begins; every step goes through all phases."""
        self._position = (step, phase)
        if phase == LoopPhase.COMPUTE:
            self._began_at = time.monotonic()
        if phase == LoopPhase.SAVE:
            self._step_seconds.append(time.monotonic() - self._began_at)
            if len(self._step_seconds) == 1:  # the first step compiles and connects
                limit_collectives(COLLECTIVES_LATER * self._allowed_seconds())

    def close(self) -> None:
        """End the thread and remove the heartbeat."""
        self._over.set()
        self._thread.join()
        self._directory.heartbeat(self._rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # other ranks' files, or those of a hang
            self._directory.watch.rmdir()

    def _allowed_seconds(self) -> float:
        return max(self._hang_seconds, USUAL_STEPS * median(self._step_seconds))

    def _watch(self) -> None:
        """Count the beats since the last step, not the time: suspended processes count none."""
        last_position, silent = self._position, 0
        while self._alive():
            position = self._position
            # Nothing is judged before the first step, which may compile for minutes.
            if position != last_position or not self._step_seconds:
                last_position, silent = position, 0
                continue
            silent += 1
            still = SAVING_BEATS if position[1] == LoopPhase.SAVE else STILL_BEATS
            # Judging takes `still` more beats: the verdict falls when the allowed time is over.
            if silent >= BEATS * self._allowed_seconds() / self._hang_seconds - still:
                self._judge(position, still)
                silent = 0

    def _alive(self) -> bool:
        """Write a heartbeat and wait until the next one is due; return False at the end."""
        self._beats += 1
        beat = Heartbeat(
            self._rank, socket.gethostname(), os.getpid(), self._beats, *self._position
        )
        path = self._directory.heartbeat(self._rank)
        with contextlib.suppress(OSError):  # a full disk ends a run by its checkpoints
            # Renamed into place, so that no other rank reads half a heartbeat.
            aside = path.with_suffix(".aside")
            aside.write_text(json.dumps(beat))
            aside.replace(path)
        return not self._over.wait(self._hang_seconds / BEATS)

    def _judge(self, position: tuple[int, LoopPhase], still: int) -> None:
        """End the attempt, unless this rank advances within so many beats.

        A save takes as long as it needs: only a dead rank ends it.
        """
        earlier = self._heartbeats()
        for _ in range(still):
            if not self._alive() or self._position != position:
                return
        now = self._heartbeats()
        # Beats count up: a heartbeat that is the same after so long is of a rank that is not alive.
        dead = [beat for beat in now if beat == earlier[beat.rank] and beat.rank != self._rank]
        if position[1] == LoopPhase.SAVE and not dead:
            return
        living = [beat for beat in now if beat not in dead]
        self._end(diagnosis(living, dead), speaks=living[0].rank == self._rank)

    def _heartbeats(self) -> list[Heartbeat]:
        beats = []
        for rank in range(dist.get_world_size()):
            beat = Heartbeat(rank)
            with contextlib.suppress(OSError, ValueError):
                beat = Heartbeat(*json.loads(self._directory.heartbeat(rank).read_text()))
            beats.append(beat)
        return beats

    def _end(self, reason: str, *, speaks: bool) -> None:
        """Leave the stacks of this rank and its newest collectives in RUN/watch, and exit."""
        last = threading.Timer(LEAVING_SECONDS, os._exit, [os.EX_TEMPFAIL])
        last.daemon = True
        last.start()
        last_step = self._position[0] - 1
        line = f"no step for {self._allowed_seconds():.0f} s after step {last_step}: {reason}"
        if speaks:
            stacks = f"stacks are in {self._directory.watch}"
            print(f"{HUNG}{line}; {stacks}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            with self._directory.stacks(self._rank).open("w") as file:
                faulthandler.dump_traceback(file)
            trace = Path(f"{self._directory.flight_recorder}{self._rank}")
            trace.write_bytes(_dump_fr_trace())
            if speaks:
                self._attempt.record_end("failed", last_step, line)
        if not speaks:
            time.sleep(SPEAKING_SECONDS)
        # sys.exit would end this thread alone, and the main thread is what hangs.
        os._exit(os.EX_TEMPFAIL)
