"""The memory that a computation takes, as torch and Python count it: the same on every machine.

The resident set of a process also holds what kernels of this CPU keep, pages that a loaded machine
took back, and gaps of malloc.
"""

import gc
import tracemalloc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def most_allocated(computation: Callable[[], object]) -> int:
    """Return the most bytes of tensors on the CPU that a computation holds at once.

    Those that were there before do not count. NumPy's arrays and Python's objects come from another
    allocator: see `most_of_python`.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        computation()
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = most = 0
    for event in events:
        if event.name() == "[memory]":  # positive where it allocates, negative where it frees
            now += event.nbytes()
            most = max(most, now)
    return most


def most_of_python(computation: Callable[[], object]) -> int:
    """Return the most bytes of NumPy's arrays and Python's objects, those before left out."""
    gc.collect()
    tracemalloc.start()
    try:
        computation()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
