"""Bytes that a computation takes, by the process's own peak."""

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's numbers of its parameters
KEPT = 65536  # bytes
LIBC = ctypes.CDLL(None)


def return_what_is_freed() -> None:
    """Let glibc return at once what is freed, so that no gap of an arena takes or hides a tensor.

    Comes before the first tensor: what has been freed by then stays.
    """
    for parameter in (TRIM_THRESHOLD, MMAP_THRESHOLD):
        assert LIBC.mallopt(parameter, KEPT)


def grown_by(computation: Callable[[], object]) -> int:
    """Return the bytes that this process grows by at most while it computes."""
    gc.collect()
    LIBC.malloc_trim(0)  # or it would grow into pages that are free already
    Path("/proc/self/clear_refs").write_text("5")  # begins a new high-water mark
    before = _resident("VmRSS")
    computation()
    return _resident("VmHWM") - before


def _resident(figure: str) -> int:
    """Return the bytes of this process: VmRSS now, VmHWM at most since the mark was reset."""
    match = re.search(rf"{figure}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return 1024 * int(match[1])
