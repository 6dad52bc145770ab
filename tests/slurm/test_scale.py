"""Thousands of elements: the time and the file operations of a look, with a stand-in for SLURM."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from slurm import cluster
from slurm.cluster import JobState
from slurm.job.rendezvous import torchrun_of_nodes
from slurm.status.overview import look
from slurm.status.table import lines_of
from slurm.submission.advance import advance
from slurm.submission.record import existing_submission
from slurm.submission.submit import submit
from study.definition import Study
from study.steps import steps_of
from tests.interpreter import interpreter
from tests.slurm.studies import (
    changed,
    in_state,
    make,
    watched_site,
    watched_study,
    write_metrics,
)

counted: Counter[str] = Counter()  # by the audit hook, which nothing takes away again
hooked: list[bool] = []


@pytest.fixture
def slurm(monkeypatch) -> dict[str, JobState]:
    """A queue in which everything waits."""
    queue: dict[str, JobState] = {}

    def submitted(script: Path, array: str, token: str) -> int:
        number = len(queue) + 100
        for part in array.split(","):
            first, _, last = part.partition("-")
            for index in range(int(first), int(last or first) + 1):
                queue[f"{number}_{index}"] = in_state("PENDING", "Priority")
        return number

    monkeypatch.setattr(cluster, "submit", submitted)
    monkeypatch.setattr(
        cluster, "states", lambda ids: {name: queue[name] for name in ids if name in queue}
    )
    monkeypatch.setattr(cluster, "check", lambda _script, *_options: None)
    monkeypatch.setattr(cluster, "max_array_size", lambda: 1001)
    return queue


def large_study(runs: int, checkpoints: int) -> Study:
    """Runs with many checkpoints, 16 specs in 4 groups and curvature: six elements a checkpoint."""
    study = watched_study()
    specs = tuple(f"gptq-b{bits}-g{size}" for bits in (2, 3, 4, 8) for size in (8, 16, 32, 64))
    steps = tuple(range(4, 4 * checkpoints + 1, 4))
    long = changed(study.runs[0], save_steps=steps, total_steps=steps[-1])
    several = tuple(changed(long, name=f"run{number}", seed=number + 1) for number in range(runs))
    return changed(study, runs=several, quantization={"specs": specs})


def two_thirds_made(root: Path, study: Study, updates: int = 2000) -> Path:
    """The directory of a submitted study with two of three steps made, its trainings' updates
    logged.
    """
    submit(study, watched_site(root))
    names = [step.name for step in steps_of(study)]
    make(root / study.name, study, names[: len(names) * 2 // 3])
    for run in study.trained:
        write_metrics(root / study.name, run.name, range(1, updates), attempt=1)
    return root / study.name


def operations(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> int:
    """Return how often a call asks the filesystem: files opened, directories listed, stat."""
    if not hooked:
        asked = ("open", "os.scandir", "os.listdir")
        sys.addaudithook(lambda event, _: counted.update([event] * (event in asked)))
        hooked.append(True)
    real = os.stat

    def stat(*arguments, **options):
        counted["stat"] += 1
        return real(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        counted.clear()
        call()
        return counted.total()


def test_a_look_without_news_asks_little_of_the_filesystem(tmp_path, slurm, monkeypatch):
    """The number does not grow with the elements, but with checkpoints whose export is open."""
    asked = []
    for checkpoints in (20, 80):
        root = tmp_path / str(checkpoints)
        root.mkdir()
        study = large_study(2, checkpoints)
        directory = two_thirds_made(root, study)
        assert 50 < sum(advance(directory).values()) <= 100, "as many as the site lets queue"
        assert advance(directory) == {}
        asked.append(operations(monkeypatch, partial(advance, directory)))
    few, many = asked
    assert 10 < few <= many <= few + 5


@pytest.mark.stress
def test_10_000_elements(tmp_path, slurm):
    study = large_study(4, 400)

    def seconds(call: Callable[[], object]) -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    first = seconds(lambda: submit(study, watched_site(tmp_path)))
    directory = two_thirds_made(tmp_path, study, updates=20_000)
    arrays = existing_submission(directory).arrays
    assert sum(len(array.elements) for array in arrays) > 9000
    advance(directory)
    figures = {
        "submit": first,
        "submit again": seconds(lambda: submit(study, watched_site(tmp_path))),
        "advance": seconds(lambda: advance(directory)),
        "status": seconds(lambda: lines_of(look(directory))),
    }
    print({name: round(value, 2) for name, value in figures.items()})
    assert figures["submit"] < 5
    assert figures["submit again"] < 5
    assert figures["advance"] < 2
    assert figures["status"] < 2


@pytest.mark.parametrize("nodes", [12, pytest.param(128, marks=pytest.mark.stress)])
def test_many_nodes_meet(monkeypatch, nodes):
    """The agents of all nodes, on the processors of this machine."""
    monkeypatch.setenv("SLURMD_NODENAME", "localhost")
    words = torchrun_of_nodes("{node}", nodes, 1, "41_0.1")
    command = [interpreter(), *words[1:], "--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE"]

    began = time.monotonic()
    agents = [
        subprocess.Popen(
            command,
            env={**os.environ, "SLURM_NODEID": str(number)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(nodes)
    ]
    ended = [agent.communicate() for agent in agents]
    print(f"{nodes} nodes: {time.monotonic() - began:.1f} s")
    assert [agent.returncode for agent in agents] == [0] * nodes, ended[0][1][-3000:]
    assert {out.strip() for out, _ in ended} == {f"{rank} of {nodes}" for rank in range(nodes)}
