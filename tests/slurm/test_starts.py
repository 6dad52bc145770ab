"""When an element gives up, and what its job does while it waits."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from base.errors import UserError
from slurm.job.starts import check_progress, last_restart, record_start, starts_of
from slurm.job.supervision import say, wait_for


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts the element `train/0` of a job, with its work come as far as `position`."""

    def again(job: str, restart: int, position: int, limit: int = 3) -> None:
        monkeypatch.setenv("SLURM_ARRAY_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart))
        check_progress(tmp_path, "train", 0, position, limit)
        record_start(tmp_path, "train", 0, position)

    return again


def test_starts_are_counted_by_progress(start, tmp_path):
    for restart in range(40):
        start(
            "7", restart, position=100 * restart
        )  # a run that is preempted forty times and comes further each time
    for restart in (40, 41):
        start("7", restart, position=3900)
    with pytest.raises(UserError, match="3 starts of train/0 came no further"):
        start("7", 42, position=3900)
    assert len(starts_of(tmp_path, "train", 0)) == 42
    start("9", 0, position=3900)  # a retry begins to count anew
    assert last_restart(tmp_path, "train", 0) == 0
    for restart in (1, 2):
        start("9", restart, position=3900)
    start("9", 3, position=3901)  # one step is progress


def test_a_run_that_is_set_back_does_not_count_as_progress(start):
    start("7", 0, position=50)
    start("7", 1, position=30)  # a damaged checkpoint
    start("7", 2, position=40)
    start("7", 3, position=60)
    start("7", 4, position=60)
    start("7", 5, position=50)
    with pytest.raises(UserError, match="came no further"):
        start("7", 6, position=50)


def waiting(code: str, tmp_path: Path, **calls) -> int:
    defaults = {"asked": lambda: False, "stop": lambda: False, "recurring": lambda: None}
    return wait_for(
        [sys.executable, "-I", "-c", code], dict(os.environ), tmp_path, **(defaults | calls)
    )


def test_the_exit_status_is_the_commands(tmp_path):
    assert waiting("raise SystemExit(7)", tmp_path) == 7
    assert (
        waiting("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
        == 128 + signal.SIGKILL
    )


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


def test_an_error_beside_the_command_leaves_no_process(tmp_path):
    def fail() -> None:
        raise OSError("no space left")

    code = (
        "import os, time; open('new', 'w').write(str(os.getpid())); os.rename('new', 'pid');"
        " time.sleep(100_000)"
    )

    def fail_later() -> None:
        if (tmp_path / "pid").exists():
            fail()

    with pytest.raises(OSError, match="no space left"):
        waiting(code, tmp_path, recurring=fail_later)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_log_that_cannot_grow_is_no_reason_to_end():
    code = "from slurm.job.supervision import say\nsay('x')\nimport os\nos._exit(5)"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, cwd=Path(__file__).parent.parent.parent
        )
    assert done.returncode == 5
    say("and otherwise it is a line")
