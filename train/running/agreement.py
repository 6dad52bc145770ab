"""The flags on which all ranks agree in every step, by the sums that the step makes anyway."""

from collections.abc import Sequence

import torch.distributed as dist

from base import stopping
from base.errors import UserError
from train.checkpoints.attempt import Attempt, SupersededError
from train.checkpoints.saving import Saver
from train.distributed import from_rank_zero, gathered, largest
from train.monitoring import peak_memory_bytes
from train.run.directory import RunDirectory


class Agreement:
    """The flags of one rank, and their result over all. Every rank calls every method.

    A message of its own would go around a ring of all ranks while the GPUs wait. So flags are added
    to a reduction that exists: each counts the ranks that raise it. They are read while a GPU still
    computes, so what comes later in the step counts at the end of the next one.

    Attributes:
        stop_reason: who asked this rank to stop, if anybody.
        stopping: whether any rank was asked to.
        memory_bytes: largest peak of any rank's memory.
    """

    def __init__(self, directory: RunDirectory, attempt: Attempt, saver: Saver) -> None:
        self._directory, self._attempt, self._saver = directory, attempt, saver
        self._successor: str | None = None
        self._failure: str | None = None
        self._peak_bytes = 0.0
        self.stop_reason = ""
        self.stopping = False
        self.memory_bytes = 0.0

    def flags(self, failure: str | None) -> list[float]:
        """Return this rank's flags as zeros and ones; `reached` takes their sums over all ranks.

        Among them is a `failure` to read the next batch.
        """
        rank_zero = dist.get_rank() == 0
        stop_file = self._directory.stop_file if rank_zero else None
        self.stop_reason = stopping.requested(stop_file) or self.stop_reason
        self._successor = self._attempt.successor() if rank_zero else None
        self._failure = failure
        self._peak_bytes = float(peak_memory_bytes())
        flags = (
            self.stop_reason,
            self._saver.writing,
            self._successor,
            self._failure,
            self._peak_bytes > self.memory_bytes,
        )
        return [float(bool(flag)) for flag in flags]

    def reached(self, step: int, sums: Sequence[float]) -> bool:
        """Note what the ranks' flags of `step` come to; return whether any still writes a save.

        Raises:
            SupersededError: a newer attempt has begun.
            UserError: a rank cannot read the next batch.
        """
        stop, writing, superseded, failed, grown = (count > 0 for count in sums)
        if superseded:
            raise SupersededError(from_rank_zero(self._successor))
        self.stopping = stop
        if failed and not self.stopping:
            self.raise_failures(step, self._failure)
        if grown:
            # A maximum is no sum. But peaks only grow, and soon seldom do: until one is above all
            # others, the last maximum holds.
            (self.memory_bytes,) = largest([self._peak_bytes])
        return writing

    def raise_failures(self, step: int, failure: str | None) -> None:
        """Raise on every rank that one of them cannot read the batch after `step`, if so.

        Raised there alone, the error would leave the others waiting for it in their next step.
        """
        for rank, reason in enumerate(gathered(failure)):
            if reason:
                self._saver.flush()
                raise UserError(f"rank {rank} cannot read its batch of step {step + 1}: {reason}")
