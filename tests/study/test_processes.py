"""Commands in forks of the process that has the imports: the same as in new interpreters."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from study.pipeline import warm
from study.pipeline.processes import Processes
from study.pipeline.runner import child_environment
from tests.interpreter import interpreter, real_interpreter
from tests.waiting import wait_until

PROJECT = Path(__file__).resolve().parents[2]
SLEEPING = "import subprocess; subprocess.run(['sleep', '600.25'])"  # with a child of its own


def environment() -> dict[str, str]:
    """That of the steps, the same throughout a test: pytest names its phase there."""
    return {
        name: value
        for name, value in child_environment("").items()
        if name != "PYTEST_CURRENT_TEST"
    }


def sleeping() -> list[psutil.Process]:
    candidates = psutil.process_iter(["cmdline"])
    return [process for process in candidates if "600.25" in (process.info["cmdline"] or ())]


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Processes of this test; `timeit` is a command that runs a line of Python."""
    monkeypatch.setattr(sys, "executable", interpreter())
    monkeypatch.setattr(warm, "COMMANDS", {"ckpt_tools", "timeit"})
    with (tmp_path / "lock").open("a") as lock, Processes(PROJECT, lock.fileno()) as processes:
        processes.warm_up(environment())
        wait_until(processes.is_warm, "the imports")
        yield processes


def outcome(
    processes: Processes, log: Path, variables: dict[str, str], *, is_fork: bool
) -> tuple[int, str]:
    command = [sys.executable, "-m", "ckpt_tools", "inspect", "nowhere"]
    with log.open("wb") as output:
        process = processes.start(command, output, variables)
    assert (process._process is None) == is_fork
    return process.wait(), log.read_text()


def test_a_fork_ends_as_a_new_interpreter_does(processes, tmp_path):
    forked = outcome(processes, tmp_path / "forked.log", environment(), is_fork=True)
    other = environment() | {"ANOTHER": "environment"}  # which no fork can have
    assert forked == outcome(processes, tmp_path / "new.log", other, is_fork=False)
    assert forked[0] == 2
    assert forked[1].startswith("error: nowhere is not a directory")


@pytest.mark.parametrize("how", ["end", "kill"])
def test_a_fork_leaves_nothing_when_its_runner_ends_it_or_is_gone(processes, tmp_path, how):
    with (tmp_path / "log").open("wb") as output:
        command = [sys.executable, "-m", "timeit", SLEEPING]
        process = processes.start(command, output, environment())
    assert process._process is None, "a fork"
    wait_until(sleeping, "a child of the fork at work")
    if how == "end":
        process.end()
        assert process.wait()
    else:
        process.leash.close()  # as the end of the runner's process does
    wait_until(lambda: not sleeping(), "the end of all that the fork started")


@pytest.mark.stress
def test_the_process_that_forks_has_no_thread_but_an_allocators():
    program = (
        "import pathlib; from study.pipeline import warm; warm.import_all();"
        "tasks = pathlib.Path('/proc/self/task').iterdir();"
        "print(*((task / 'comm').read_text().strip() for task in list(tasks)))"
    )
    done = subprocess.run(
        [real_interpreter(), "-c", program],
        env=environment(),
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.split()) == ["jemalloc_bg_thd", "python"]
