"""Memory and GPUs that a process may use, and the precision of a GPU."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from base import host_memory
from base.errors import UserError
from base.ranks import own_gpu

GB = 10**9


@pytest.fixture
def machine(monkeypatch, tmp_path) -> Path:
    """A machine of 64 GB, half of them free, whose groups are below `cgroup`."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    memory = SimpleNamespace(total=64 * GB, available=32 * GB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host_memory, "CGROUPS", tmp_path / "cgroup")
    return tmp_path


def group(directory: Path, names: tuple[str, str, str], most: str, used: int, cached: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    limit, current, statistic = names
    (directory / limit).write_text(f"{most}\n")
    (directory / current).write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 1\n{statistic} {cached}\n")


def total_and_free(machine: Path, cgroup: str) -> tuple[float, float]:
    """Return GB that a process of this group may use, and those that are free."""
    (machine / "proc" / "self" / "cgroup").write_text(cgroup)
    limits = [limit for limit, _ in host_memory._limits()]
    total = min([psutil.virtual_memory().total, *limits])
    return round(total / GB, 3), round(host_memory.free_memory() / GB, 3)


def test_without_a_limit_it_is_the_machine(machine):
    group(machine / "cgroup" / "user", host_memory.V2, "max", 5 * GB, 0)
    assert total_and_free(machine, "0::/user\n") == (64, 32)


def test_the_smallest_limit_above_counts_and_a_cache_is_free(machine):
    group(machine / "cgroup" / "job", host_memory.V2, str(16 * GB), 10 * GB, 4 * GB)
    group(machine / "cgroup" / "job" / "step", host_memory.V2, "max", 10 * GB, 0)
    assert total_and_free(machine, "0::/job/step\n") == (16, 10)


def test_the_first_version_and_a_container_that_shows_its_root_alone(machine):
    group(machine / "cgroup" / "memory", host_memory.V1, str(8 * GB), 6 * GB, 1 * GB)
    assert total_and_free(machine, "5:cpu:/slurm\n4:memory:/slurm/uid_0/job_1\n") == (8, 3)


def test_of_this_machine():
    limits = [limit for limit, _ in host_memory._limits()]
    assert 0 < host_memory.free_memory() <= min([psutil.virtual_memory().total, *limits])


def test_a_gpu_that_would_multiply_fp32_in_tf32_is_refused(tf32):
    reason = r"in TF32 here, .*; set TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0"
    with pytest.raises(UserError, match=reason):
        own_gpu()
