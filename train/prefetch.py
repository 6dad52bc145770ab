"""Batches read ahead of the steps that train on them."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread

from base.errors import UserError
from train.data.batches import Batch

STEPS_AHEAD = 2


class Prefetch:
    """The batches of consecutive steps, read by a thread while the engine computes.

    A batch is a function of its step, so one that was read ahead and not used is not a loss.
    """

    def __init__(self, read: Callable[[int], Batch], last_step: int) -> None:
        self._read, self._last_step = read, last_step
        self._requests: SimpleQueue[tuple[int, Future[Batch]]] = SimpleQueue()
        self._reading: dict[int, Future[Batch]] = {}
        # A daemon: a file system that hangs must not keep a run that was stopped from ending.
        Thread(target=self._work, name="data", daemon=True).start()

    def _work(self) -> None:
        while True:
            step, future = self._requests.get()
            try:
                future.set_result(self._read(step))
            except Exception as error:  # noqa: BLE001  raised where the batch is asked for
                future.set_exception(error)

    def __call__(self, step: int) -> Batch:
        """Return the batch of a step; raise what reading it raised."""
        self._request(step)
        return self._reading.pop(step).result()

    def failure(self, step: int) -> str | None:
        """Return why the batch of a step cannot be read, if so, once it has been tried.

        This rank alone knows: the others have other rows. None after the last step.
        """
        if step > self._last_step:
            return None
        self._request(step)
        error = self._reading[step].exception()
        if isinstance(error, OSError):
            return f"{error}; restore the file or free space, and run again"
        if error and not isinstance(error, UserError):
            raise error
        return str(error) if error else None

    def _request(self, step: int) -> None:
        for ahead in range(step, min(step + STEPS_AHEAD, self._last_step) + 1):
            if ahead not in self._reading:
                self._reading[ahead] = Future()
                self._requests.put((ahead, self._reading[ahead]))
