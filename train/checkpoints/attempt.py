"""One start of a run: its number, its lock on the run directory, and its status.json."""

import os
import socket
import time
from pathlib import Path
from typing import IO, Any

import psutil
import torch
import torch.distributed as dist

from base import stopping
from base.environment import hardware
from base.errors import UserError
from base.files import freed, take_lock
from train.distributed import from_rank_zero, gathered
from train.run.directory import RunDirectory
from train.run.environment import OWNER, amend_attempt, attempts, nodes_of, record_attempt
from train.run.launch import recorded_variables
from train.run.status import Ending, Status, write_status


class SupersededError(UserError):
    """A later attempt of the run has begun: this one must write nothing more, not even its end."""


class Attempt:
    """One attempt on this rank; rank 0 writes.

    Two things keep attempts apart. A lock on the run refuses a second one while the first is alive.
    A node that SLURM gave up may continue training, though, and hold the lock: the next job of the
    same OWNER resumes without it. That one is in environment.json, and so the orphan finds that it
    is no longer the newest before it publishes a checkpoint or logs anything.

    Attributes:
        number: counted from 1.
    """

    def __init__(self, directory: RunDirectory, fingerprint: str, layout: dict[str, int]) -> None:
        self._directory, self._fingerprint = directory, fingerprint
        self._seen: tuple[int, int] | None = None
        nodes = nodes_of(gathered((socket.gethostname(), hardware())))
        self._rank_zero = dist.get_rank() == 0
        self._lock: IO[str] | None = None
        number = 0
        if self._rank_zero:
            directory.path.mkdir(exist_ok=True)
            if self._take_lock():
                number = record_attempt(
                    directory.environment_json,
                    began=psutil.Process().create_time(),
                    nodes=nodes,
                    layout=layout,
                    variables=recorded_variables(),
                    deterministic=torch.are_deterministic_algorithms_enabled(),
                )
        self.number: int = from_rank_zero(number)
        # Rank 0 did not get the lock: every rank learns of it, and all raise.
        if not self.number:
            raise UserError(
                f"another process is training {directory.path}; {freed(self._lock_path)}"
            )

    @property
    def _lock_path(self) -> Path:
        return self._directory.path / ".lock"

    def _take_lock(self) -> bool:
        """Return whether this attempt may train: it, or an orphan of its owner, has the lock."""
        owner = os.environ.get(OWNER, "")
        # Opened without truncation: the process that holds the lock wrote its owner there.
        self._lock = self._lock_path.open("a+")
        if not take_lock(self._lock):
            self._lock.seek(0)
            return bool(owner) and self._lock.read() == owner
        self._lock.truncate(0)
        self._lock.write(owner)
        self._lock.flush()
        return True

    def amend(self, **details: Any) -> None:
        """Add details to the entry of this attempt in environment.json."""
        if self._rank_zero:
            amend_attempt(self._directory.environment_json, self.number, **details)

    def successor(self) -> str | None:
        """Return on rank 0 why this attempt has to end; None while it is the newest. Cheap."""
        try:
            # Opened, as a network filesystem keeps attributes for a minute, but not across an open.
            with self._directory.environment_json.open("rb") as file:
                status = os.fstat(file.fileno())
            # The file is always replaced whole: a new one has another inode or time.
            if (status.st_ino, status.st_mtime_ns) == self._seen:
                return None
            recorded = attempts(self._directory.environment_json)
        except FileNotFoundError:
            return None
        # Attempts are numbered by their places in the list.
        if len(recorded) > self.number:
            return (
                f"attempt {len(recorded)} has begun on {recorded[-1]['host']}; this one,"
                f" {self.number}, leaves"
            )
        self._seen = (status.st_ino, status.st_mtime_ns)
        return None

    def end(self, ending: Ending, step: int, reason: str, **details: Any) -> None:
        """Write status.json, remove a used STOP file, and ignore signals from now on."""
        if self._rank_zero:
            # A failed attempt did not obey the STOP file; the next one does.
            if ending != "failed":
                self._directory.stop_file.unlink(missing_ok=True)
            self.record_end(ending, step, reason, **details)
        stopping.ignore()

    def record_end(self, ending: Ending, step: int, reason: str, **details: Any) -> None:
        """Write status.json; `details` are further fields of `Status`."""
        status = Status(
            status=ending,
            step=step,
            attempt=self.number,
            fingerprint=self._fingerprint,
            reason=reason,
            time=time.time(),
            **details,
        )
        write_status(self._directory, status)
