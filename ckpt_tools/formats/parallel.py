"""Work on files in several threads: reading, hashing and writing need no interpreter."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from base.digests import Algorithm
from base.errors import UserError
from base.files import FileRecord, hash_file, verify_files

MOST_THREADS = 8  # more wait for the disk


def default_threads() -> int:
    """Return the number of cores for this process, at most eight."""
    return min(len(os.sched_getaffinity(0)), MOST_THREADS)


def each[Item, Result](work: Callable[[Item], Result], items: Sequence[Item]) -> dict[Item, Result]:
    """Return the result for every item; they begin in that order, the first error is raised."""
    with ThreadPoolExecutor(default_threads()) as pool:
        return dict(zip(items, pool.map(work, items), strict=True))


def ahead[Item, Result](
    work: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Iterator[Result]:
    """Yield the result for every item in order, while threads work on the next, two each."""
    with ThreadPoolExecutor(threads) as pool:
        futures: deque[Future[Result]] = deque()
        for item in items:
            futures.append(pool.submit(work, item))
            # The bound keeps what is read and not yet taken from filling the memory.
            if len(futures) > 2 * threads:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()


def verify_in_parallel(directory: Path, records: dict[str, FileRecord], next_action: str) -> None:
    """Raise what `base.files.verify_files` raises, hashing several files at once."""

    def check(name: str) -> None:
        verify_files(directory, {name: records[name]}, next_action)

    # The largest first, so that no thread is left with a long file at the end.
    each(check, sorted(records, key=lambda name: -records[name].bytes))


def is_whole(directory: Path, records: dict[str, FileRecord]) -> bool:
    """Return whether every recorded file is there unchanged."""
    try:
        verify_in_parallel(directory, records, "")
    except UserError:
        return False
    return True


def hash_in_parallel(
    directory: Path,
    names: Iterable[str],
    known_records: dict[str, FileRecord],
    algorithm: Algorithm = "blake3",
) -> dict[str, FileRecord]:
    """Return size and hash of files by name; those in `known_records` are not read again."""
    names = list(names)
    unknown = [name for name in names if name not in known_records]
    records = known_records | each(lambda name: hash_file(directory / name, algorithm), unknown)
    return {name: records[name] for name in names}
