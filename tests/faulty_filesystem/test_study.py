"""Whole studies on a filesystem that fails, and again until they end: table as undisturbed."""

import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faulty_filesystem import Behaviour, Fault, missing, mounted
from tests.interpreter import interpreter
from tests.lacking import skip
from tests.runs import PROJECT, environment
from tests.slurm.studies import table
from tests.waiting import HANG_SECONDS

COMMAND = ["-m", "study", "run", "tiny", "--profile", "smoke", "--root"]
NAME = "tiny-smoke"
MOST_STARTS = 60
CALMER = 0.8  # the rates of a start, times those of the start before: the last ones end
# What is lost by each: a part of what was written, an answer, or the operation.
FAULTS = (
    Fault("write_back", "EIO", 0.004),
    Fault("write_back", "ENOSPC", 0.003),
    Fault("write_back", "EDQUOT", 0.003),
    Fault("write", "EIO", 0.0005),
    Fault("fsync", "EIO", 0.01),
    Fault("rename", "EIO", 0.01),
    Fault("rename", "EIO", 0.01, after=True),
    Fault("create", "EIO", 0.004),
    Fault("create", "ESTALE", 0.004),
    Fault("open", "EIO", 0.0005),
    Fault("open", "ESTALE", 0.01),
    Fault("read", "EIO", 0.0005),
    Fault("lookup", "EIO", 0.0003),
    Fault("lookup", "ESTALE", 0.002),
    Fault("unlink", "EIO", 0.005),
    Fault("mkdir", "EIO", 0.01, after=True),
    Fault("readdir", "EIO", 0.005),
    Fault("setlk", "EIO", 0.02),
)


def run(root: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [interpreter(), *COMMAND, str(root)],
        cwd=PROJECT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=6 * HANG_SECONDS,
        check=False,
    )


@pytest.mark.stress
@pytest.mark.parametrize("seed", [1, 2])
def test_a_study_through_a_storm_of_faults(tmp_path, seed):
    """The user starts it again after each start that ended with one line and exit code 2."""
    if reason := missing():
        skip(f"no filesystem of the tests here: {reason}")
    undisturbed = run(tmp_path / "plain")
    assert undisturbed.returncode == 0, undisturbed.stderr[-3000:]
    weather(tmp_path, tmp_path / "plain" / NAME, seed)


def weather(directory: Path, plain: Path, seed: int) -> None:
    """Run the study to its end on a mount that fails; print the table of its faults."""
    backing, root = directory / "backing", directory / "root"
    calm = Behaviour(cache_seconds=1.0)
    said: list[str] = []
    began = time.monotonic()
    with mounted(backing, root, calm) as mount:
        for start in range(MOST_STARTS):
            share = CALMER**start
            faults = tuple(replace(fault, rate=fault.rate * share) for fault in FAULTS)
            mount.behave(replace(calm, seed=1000 * seed + start, faults=faults))
            done = run(root)
            lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
            said += lines
            print(f"start {start}: code {done.returncode} {lines[-1:]}", flush=True)
            assert "Traceback" not in done.stderr, done.stderr[-5000:]
            if done.returncode == 0:
                break
            assert done.returncode == 2, done.stderr[-5000:]
            assert len(lines) == 1, done.stderr[-5000:]
        mount.behave(calm)
        injected, operations = mount.injected(), mount.operations()
    assert done.returncode == 0, "it does not end"
    # Read where the files are: no cache of the mount is in the way.
    assert table(backing / NAME) == table(plain), "bit for bit"
    print(f"seed {seed}: {sum(operations.values())} operations, {time.monotonic() - began:.0f} s")
    print("| fault | injected | survived | lost |\n|---|---|---|---|")
    for name, count in sorted(injected.items()):
        print(f"| {name} | {count} | {count} | 0 |")
    print(f"| all | {sum(injected.values())} | {sum(injected.values())} | 0 |")
    print(f"starts of the study: {start + 1}, of which {len(said)} ended with one line")
