"""Batches read ahead of the steps that train on them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from train.data.batches import Batch

STEPS_AHEAD = 2


class Prefetch:
    """The batches of consecutive steps, read by a thread while the engine computes.

    A batch is a function of its step, so what was read ahead and never asked for is nothing lost.
    """

    def __init__(self, read: Callable[[int], Batch], last_step: int) -> None:
        self._read, self._last_step = read, last_step
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._reading: dict[int, Future[Batch]] = {}

    def __call__(self, step: int) -> Batch:
        """Return the batch of a step; raise what reading it raised."""
        for ahead in range(step, min(step + STEPS_AHEAD, self._last_step) + 1):
            if ahead not in self._reading:
                self._reading[ahead] = self._thread.submit(self._read, ahead)
        return self._reading.pop(step).result()
