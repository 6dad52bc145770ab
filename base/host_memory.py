"""The memory that this process may use, within the limits of its container or SLURM job."""

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
# Files of cgroup v2 and of v1's memory controller: the limit, the use, and the key in memory.stat
# of cache pages that the kernel can drop.
V2 = ("memory.max", "memory.current", "inactive_file")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def free_memory() -> int:
    """Return the free bytes for this process and those beside it; caches count as free."""
    return max(
        0,
        min([int(psutil.virtual_memory().available), *(limit - used for limit, used in _limits())]),
    )


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use of every control group of this process that has a limit."""
    for line in (PROC / "self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        # Version 2 has one hierarchy for all controllers, which has the number 0 and no names.
        if number == "0" and not controllers:
            root, names = CGROUPS, V2
        elif "memory" in controllers.split(","):
            root, names = CGROUPS / "memory", V1
        else:
            continue
        group = root / path.lstrip("/")
        # The limit of any group above this one holds as well.
        for directory in (group, *group.parents):
            limit, used, cached = (directory / name for name in (*names[:2], "memory.stat"))
            # Inside a container the path may be the host's, and only the root is there.
            if limit.exists() and limit.read_text().strip() != "max":
                statistics = dict(line.split() for line in cached.read_text().splitlines())
                free = int(statistics.get(names[2], 0))
                yield int(limit.read_text()), int(used.read_text()) - free
            if directory == root:
                break
