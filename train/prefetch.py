"""Batches read ahead of the steps that train on them."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from train.data.batches import Batch

STEPS_AHEAD = 2


class Prefetch:
    """The batches of consecutive steps, read by a thread while the engine computes.

    A batch is a function of its step, so what was read ahead and never asked for is nothing lost.
    The process ends without waiting for a read: a filesystem may hang.
    """

    def __init__(self, read: Callable[[int], Batch], last_step: int) -> None:
        self._read, self._last_step = read, last_step
        self._reading: dict[int, Future[Batch]] = {}
        self._requests: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="data", daemon=True).start()

    def __call__(self, step: int) -> Batch:
        """Return the batch of a step; raise what reading it raised."""
        for ahead in range(step, min(step + STEPS_AHEAD, self._last_step) + 1):
            if ahead not in self._reading:
                self._reading[ahead] = Future()
                self._requests.put(ahead)
        batch = self._reading[step].result()
        del self._reading[step]
        return batch

    def _serve(self) -> None:
        while True:
            step = self._requests.get()
            batch = self._reading[step]
            try:
                batch.set_result(self._read(step))
            except BaseException as error:  # noqa: BLE001  raised in the step that asks for it
                batch.set_exception(error)
