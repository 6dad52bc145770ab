"""The trace of some steps by torch.profiler, for `python -m train run --profile`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from base.errors import UserError

MEMORY_EVENTS = 100_000  # newest allocations and frees that a snapshot holds


class Profile:
    """The trace of some steps of rank 0, and on CUDA a snapshot of its memory.

    The trace opens in ui.perfetto.dev, the snapshot in pytorch.org/memory_viz. Other ranks do
    nothing here.
    """

    def __init__(self, steps: range, directory: Path) -> None:
        self._steps, self._directory = steps, directory

    def check(self, resumed_step: int, total_steps: int) -> None:
        """Raise UserError if this attempt does not make all of the steps."""
        if self._steps and not resumed_step < self._steps[0] <= self._steps[-1] <= total_steps:
            raise UserError(
                f"--profile {self._steps.start}:{self._steps.stop}: this start makes steps"
                f" {resumed_step + 1} to {total_steps}; give steps among them"
            )

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Record the block, which makes this step, if it is one of the steps."""
        recorded = self._steps and dist.get_rank() == 0
        if recorded and step == self._steps[0]:
            self._begin()
        yield
        if recorded and step == self._steps[-1]:
            self._end()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def _end(self) -> None:
        self._profiler.stop()
        self._directory.mkdir(exist_ok=True)
        name = f"steps{self._steps[0]}-{self._steps[-1]}"
        self._profiler.export_chrome_trace(str(self._directory / f"{name}.json.gz"))
        if torch.cuda.is_available():
            torch.cuda.memory._dump_snapshot(str(self._directory / f"{name}-memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
