"""When an element gives up, and what its job does while it waits."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm.job.supervision import HangWatch, say, wait_for
from slurm.submission.record import failures, record_end, record_start, starts_of, was_stopped
from tests.interpreter import interpreter
from tests.runs import PROJECT
from tests.slurm.studies import in_state
from tests.waiting import wait_until

JOBS = ["7_0", "8_0"]


def start(job: str, position: int, ended: str | None = None, restart: int = 0) -> dict:
    entry = {"job": job, "restart": restart, "position": position}
    return entry if ended is None else entry | {"ended": ended}


def test_failed_starts_are_counted_by_progress():
    one_each = [start("7_0", 10 * number, "failed", number) for number in range(40)]
    assert failures(one_each, ["7_0"], None, position=400) == 0, "each came further"
    assert failures(one_each, ["7_0"], None, position=390) == 1
    stuck = [*one_each, start("7_0", 390, "failed", 40), start("8_0", 390, "failed")]
    assert failures(stuck, JOBS, None, position=390) == 3
    assert failures(stuck, JOBS, None, position=391) == 0, "one step is progress"
    assert failures(stuck, ["8_0"], None, position=390) == 1, "a retry begins to count anew"


def test_a_run_that_is_set_back_does_not_count_as_progress():
    starts = [
        start("7_0", position, "failed", n) for n, position in enumerate((50, 30, 40, 60, 60))
    ]
    assert failures(starts, ["7_0"], None, position=50) == 2, "a damaged checkpoint"


def test_preempted_starts_are_no_failures():
    """Requeued by SLURM nine times on one day, with nothing saved in between."""
    starts = [start("7_0", 5, restart=number) for number in range(10)]
    for word in ("PREEMPTED", "NODE_FAIL", "CANCELLED"):
        assert failures(starts, ["7_0"], in_state(word), position=5) == 0
    for word in ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "COMPLETED"):
        assert failures(starts, ["7_0"], in_state(word), position=5) == 1, "the last one alone"
    assert failures([start("7_0", 5, "asked"), start("8_0", 5, "unfit")], JOBS, None, 5) == 0


def test_jobs_that_never_started_count():
    """As with an interpreter that is not there."""
    assert failures([], JOBS, in_state("FAILED"), position=0) == 2
    assert failures([], JOBS, in_state("PREEMPTED"), position=0) == 1
    assert failures([], ["7_0"], None, position=0) == 1


def test_a_stop_of_the_user_holds_until_a_retry():
    starts = [start("7_0", 5, "stopped")]
    assert was_stopped(starts, ["7_0"])
    assert not was_stopped(starts, ["8_0"])
    assert not was_stopped([*starts, start("8_0", 5, "failed")], JOBS)


def test_starts_are_read_as_they_were_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    record_start(tmp_path, ("train", 0), "7_0", 4, position=100)
    record_end(tmp_path, ("train", 0), "7_0", "asked")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    record_start(tmp_path, ("train", 0), "7_0", 4, position=120)
    first, second = starts_of(tmp_path, ("train", 0))
    assert (first["restart"], first["position"], first["ended"]) == (2, 100, "asked")
    assert first["until"] >= first["time"]
    assert first["host"] == second["host"] == socket.gethostname()
    assert (second["nodes"], second.get("ended")) == (4, None)


def waiting(code: str, tmp_path: Path, **calls) -> int:
    defaults = {"asked": lambda: False, "stop": lambda: False, "recurring": lambda: None}
    return wait_for(
        [sys.executable, "-I", "-c", code], dict(os.environ), tmp_path, **(defaults | calls)
    )


def test_the_exit_status_is_the_commands(tmp_path):
    assert waiting("raise SystemExit(7)", tmp_path) == 7
    killed = waiting("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert killed == 128 + signal.SIGKILL


def test_what_can_be_asked_is_asked_once_and_ends_by_itself(tmp_path):
    asked = []
    code = (
        "import pathlib, time\nwhile not pathlib.Path('STOP').exists(): time.sleep(0.05)\nraise"
        " SystemExit(3)"
    )

    def stop() -> bool:
        asked.append(1)
        (tmp_path / "STOP").touch()
        return True

    assert waiting(code, tmp_path, asked=lambda: True, stop=stop) == 3
    assert asked == [1]


def test_what_cannot_be_asked_is_interrupted(tmp_path):
    assert waiting("import time; time.sleep(100_000)", tmp_path, asked=lambda: True) != 0


def test_what_hangs_is_ended_and_named(tmp_path, capfd):
    """It is asked again and again, and ended for its answer."""
    answers = iter([None, None, "hung: no step"])
    code = "import time; time.sleep(100_000)"
    assert waiting(code, tmp_path, hung=lambda: next(answers)) != 0
    assert "error: hung: no step" in capfd.readouterr().out


def test_what_is_silent_for_too_long_hangs(tmp_path, monkeypatch):
    """A training whose ranks never meet, and one that stops logging, by a clock of the test's."""
    now = 0.0
    monkeypatch.setattr("slurm.job.supervision.time", SimpleNamespace(monotonic=lambda: now))
    watch = HangWatch(tmp_path, "run", silent_seconds=90)
    now = 89.0
    assert watch.hung() is None
    now = 90.0
    assert watch.hung() == (
        "hung: training does not start: its ranks have not met, a node does not answer at the"
        " rendezvous for 90 s"
    )
    (tmp_path / "run").mkdir()
    watch = HangWatch(tmp_path, "run", silent_seconds=90)
    for at in (150.0, 230.0, 310.0):  # each row lets it be silent anew
        now = at
        with (tmp_path / "run/metrics.jsonl").open("a") as file:
            file.write("1\n")
        assert watch.hung() is None
    now = 399.0
    assert watch.hung() is None
    now = 400.0
    assert watch.hung() == "hung: training logs nothing for 90 s"


def test_an_error_beside_the_command_leaves_no_process(tmp_path):
    code = (
        "import os, time; open('new', 'w').write(str(os.getpid())); os.rename('new', 'pid');"
        " time.sleep(100_000)"
    )

    def fail_later() -> None:
        if (tmp_path / "pid").exists():
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        waiting(code, tmp_path, recurring=fail_later)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_job_shows_that_it_lives_until_its_process_ends(tmp_path):
    log = tmp_path / "log"
    log.touch()
    os.utime(log, (0, 0))
    show = "from slurm.job.supervision import *\nshow_life(Path('log'))\ninput()"
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    with subprocess.Popen(
        [interpreter(), "-c", show], cwd=tmp_path, env=environment, stdin=subprocess.PIPE
    ) as process:
        wait_until(lambda: log.stat().st_mtime > 0, "a sign of life")
        process.kill()


def test_a_log_that_cannot_grow_is_no_reason_to_end():
    code = "from slurm.job.supervision import say\nsay('x')\nimport os\nos._exit(5)"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, cwd=PROJECT)
    assert done.returncode == 5
    say("and otherwise it is a line")
