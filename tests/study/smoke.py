"""The smoke study, killed and resumed once on its way: made once, for all tests that read it."""

import os
import signal
import subprocess
from pathlib import Path

from tests.interpreter import interpreter
from tests.runs import PROJECT, environment
from tests.waiting import wait_until

# With batches of half the size: the weights need not be good ones.
SETTINGS = ("batch_size=4", "micro_batch_size=2", "evaluate_every_steps=24")
NAME = "-".join(("tiny-smoke", *SETTINGS))
COMMAND = ["-m", "study", "run", "tiny", "--profile", "smoke"]
COMMAND += [word for setting in SETTINGS for word in ("--set", setting)]
LAST_CHECKPOINT = "lr3e-3/checkpoints/step00000072/checkpoint.json"
SAID, BEFORE_THE_KILL = "said.txt", "checkpoint-before-the-kill.txt"  # beside the study


def start(python: str, root: Path) -> subprocess.Popen:
    """Start the study in a process group of its own."""
    log = (root / "console.log").open("a")
    return subprocess.Popen(
        [python, *COMMAND, "--root", str(root)],
        cwd=PROJECT,
        env=environment(),
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def kill(process: subprocess.Popen) -> None:
    """Kill the study with all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(python: str, root: Path) -> str:
    """Run the study to its end; return what it printed."""
    done = subprocess.run(
        [python, *COMMAND, "--root", str(root)],
        cwd=PROJECT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def make_smoke_study(root: Path) -> None:
    """Run the study with kill -9 while the first quantization runs.

    What the second start printed, and when the last checkpoint was written before the kill, are
    left beside it.
    """
    root.mkdir()
    study, started = root / NAME, start(interpreter(), root)
    wait_until(
        lambda: list((study / "logs").glob("quantize-*.log")), "the first quantization", started
    )
    kill(started)
    written = (study / LAST_CHECKPOINT).stat().st_mtime_ns
    (root / BEFORE_THE_KILL).write_text(str(written))
    (root / SAID).write_text(finish(interpreter(), root))
