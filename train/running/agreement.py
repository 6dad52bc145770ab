"""The flags on which all ranks agree after every step, by one reduction of a few numbers."""

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

    Attributes:
        stop_reason: who asked this rank to stop, if anybody.
        stopping: whether any rank was asked to.
    """

    def __init__(self, directory: RunDirectory, attempt: Attempt, saver: Saver) -> None:
        self._directory, self._attempt, self._saver = directory, attempt, saver
        self.stop_reason = ""
        self.stopping = False

    def share(self, step: int, failure: str | None) -> tuple[float, bool]:
        """Return the largest peak of memory, in bytes, and whether any rank still writes a save.

        Ranks also learn of each other's requests to stop, and of a `failure` to read the batch
        after `step`.

        Raises:
            SupersededError: a newer attempt has begun.
            UserError: a rank cannot read the next batch.
        """
        rank_zero = dist.get_rank() == 0
        stop_file = self._directory.stop_file if rank_zero else None
        self.stop_reason = stopping.requested(stop_file) or self.stop_reason
        successor = self._attempt.successor() if rank_zero else None
        flags = [bool(self.stop_reason), self._saver.writing, successor is not None, bool(failure)]
        stop, writing, superseded, failed, memory_bytes = largest(
            [*map(float, flags), float(peak_memory_bytes())]
        )
        if superseded:
            raise SupersededError(from_rank_zero(successor))
        self.stopping = stop > 0
        if failed and not self.stopping:
            self.raise_failures(step, failure)
        return memory_bytes, writing > 0

    def raise_failures(self, step: int, failure: str | None) -> None:
        """Raise on every rank that one of them cannot read the batch after `step`, if so.

        Raised there alone, the error would leave the others waiting for it in their next step.
        """
        for rank, reason in enumerate(gathered(failure)):
            if reason:
                self._saver.flush()
                raise UserError(f"rank {rank} cannot read its batch of step {step + 1}: {reason}")
