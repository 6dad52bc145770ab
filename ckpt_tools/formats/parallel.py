"""Work on files in several processes of one machine."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from base.errors import UserError
from base.files import FileRecord, first_damage

MOST_PROCESSES = 8  # more wait for the disk

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_processes() -> int:
    """Return the number of cores for this process, at most eight."""
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


def each(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    meanwhile: Callable[[], object] | None = None,
) -> Iterator[tuple[int, Result]]:
    """Yield (index, result) for every item, as they are done; they begin in the order given.

    Processes are forked, so `work` may be a closure and begins at once. The first error ends it and
    is raised. This process does `meanwhile` once the others are at work.

    Raises:
        UserError: a process was killed.
    """
    processes = min(processes, len(items))
    if processes <= 1:
        if meanwhile:
            meanwhile()
        yield from ((index, work(item)) for index, item in enumerate(items))
        return
    _Forked.work = work
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_Forked.begin) as pool:
        futures = {pool.submit(_Forked.call, item): index for index, item in enumerate(items)}
        try:
            if meanwhile:
                meanwhile()
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise UserError(
                "a process was killed, for memory perhaps; run again with fewer cores (taskset)"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


class _Forked:
    """The work of forked processes, which they find in their memory."""

    work: ClassVar[Callable[[Any], Any]]

    @staticmethod
    def begin() -> None:
        torch.set_num_threads(1)  # threads do not survive a fork, and the processes share the cores

    @staticmethod
    def call(item: Any) -> Any:
        return _Forked.work(item)


def first_damage_in_parallel(
    directory: Path, records: dict[str, FileRecord], processes: int
) -> str | None:
    """Return any damage that `base.files.first_damage` finds, hashing several files at once."""
    largest_first = sorted(records, key=lambda name: -records[name].bytes)

    def damage_of(name: str) -> str | None:
        return first_damage(directory, {name: records[name]})

    return next((damage for _, damage in each(damage_of, largest_first, processes) if damage), None)
