"""A job besides its work: it waits for one process and says what happens.

Beside that process it submits what can start by then (`Advancing`), looks whether a training hangs
(`HangWatch`), and asks one to stop by a STOP file. The user writes such files too: only the user's
stop is final. Nothing here needs a file to be written: a job must survive a full disk, on which
even its log cannot grow.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from base.cli import line_of
from base.errors import UserError
from base.stopping import OTHER_RANK, SIGNALS
from slurm import cluster
from slurm.submission.advance import advance
from study.step import Step
from train.run.directory import RunDirectory
from train.run.status import read_status

POLL_SECONDS = 1.0
GRACE_SECONDS = 20.0  # after the interrupt, before SIGKILL
# srun wants the interrupt twice.
ENDING = (signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
OURS = "slurm "  # begins what an element writes into a STOP file; any other is the user's
SIGNALLED = (*(signal.name for signal in SIGNALS), OTHER_RANK)
LIFE_SECONDS = 30.0  # between signs of life of a job
LOOK_SECONDS = 10.0  # between looks at the files of the work
ADVANCE_SECONDS = 600.0  # without news from these files: jobs that SLURM cancelled come back
TRIES, TRY_SECONDS = 20, 30.0  # at the end: a controller that restarts is away for minutes
PATIENCE_SECONDS = 120.0  # for another command that is submitting
FULL_TRIES, REQUEUE_SECONDS = 2, 600  # full without another of the study: the job is requeued


def wait_for(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    *,
    asked: Callable[[], bool],
    stop: Callable[[], bool],
    recurring: Callable[[], None],
    hung: Callable[[], str | None] = lambda: None,
) -> int:
    """Run a command; return its exit status, 128 + number for a signal.

    `recurring` is called about every second. Once the job is `asked` to stop, `stop` asks the
    command to end by itself, or returns False for one that cannot be asked: it is interrupted.
    Once `hung` says what hangs, the command is ended.
    """
    process = subprocess.Popen(command, env=environment, cwd=directory, stdin=subprocess.DEVNULL)
    was_asked = False
    try:
        while True:
            # The wait paces the loop, and returns at once when the process ends.
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(POLL_SECONDS)
                return status if status >= 0 else 128 - status
            recurring()
            # Once ended, the next wait returns its status, as for any failure.
            if reason := hung():
                say(f"error: {reason}")
                end(process)
            if asked() and not was_asked:
                was_asked = True
                if not stop():
                    end(process)
    # KeyboardInterrupt and SystemExit as well: no srun may outlive this function.
    except BaseException:
        end(process)
        raise


def end(process: subprocess.Popen) -> None:
    """Interrupt a process, then kill it. srun passes both on to its tasks."""
    for number in ENDING:
        if process.poll() is not None:
            return
        process.send_signal(number)
        # The second interrupt, see ENDING, follows soon; later signals get the whole grace period.
        deadline = time.monotonic() + (0.5 if number == signal.SIGINT else GRACE_SECONDS)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)


def say(text: str) -> None:
    """Print a line, if the disk has room for it."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def show_life(log: Path) -> None:
    """Touch the log of a job for as long as this process lives; `lives` reads its age."""

    def touch() -> None:
        while True:
            with contextlib.suppress(OSError):  # the filesystem is away
                os.utime(log)
            time.sleep(LIFE_SECONDS)

    threading.Thread(target=touch, daemon=True).start()


class HangWatch:
    """The age of what a training last wrote, by the clock of this process alone.

    It sees a start or a save that does not end: the ranks watch each other's steps
    (`train.running.watchdog`), but only once all of them have met.
    """

    def __init__(self, study_dir: Path, run: str, silent_seconds: float) -> None:
        self._run, self._silent_seconds = RunDirectory(study_dir / run), silent_seconds
        self._seen, self._since = self._size(), time.monotonic()
        self._first = self._seen

    def _size(self) -> int:
        try:
            return self._run.metrics.stat().st_size
        except OSError:  # not there yet, or the filesystem is away
            return 0

    def hung(self) -> str | None:
        """Return what hangs, in words, once nothing was logged for too long; None until then."""
        size, now = self._size(), time.monotonic()
        if size != self._seen:
            self._seen, self._since = size, now
        if now - self._since < self._silent_seconds:
            return None
        what = "training logs nothing"
        # The log has not grown since this attempt began: no rank has made a step.
        if self._seen == self._first:
            what = f"training does not start: {self._missing()}"
        return f"hung: {what} for {self._silent_seconds:.0f} s"

    def _missing(self) -> str:
        """Return how many ranks have met; before, none has written a heartbeat."""
        reports = sorted(self._run.watch.glob("rank*.json")) if self._run.watch.exists() else []
        if not reports:
            return "its ranks have not met, a node does not answer at the rendezvous"
        return f"{len(reports)} ranks have met and none makes a step"


def ask_to_stop(study_dir: Path, step: Step, start: str) -> bool:
    """Ask a training to stop; return False where the file cannot be written."""
    stop = RunDirectory(study_dir / step.run).stop_file
    try:
        if not stop.exists():
            stop.write_text(f"{OURS}{start}\n")
    except OSError as error:
        say(f"{stop} could not be written ({error}); training is ended without a checkpoint")
        return False
    say(f"asked to stop; {stop} is left for training")
    return True


def stopped_by(study_dir: Path, step: Step) -> Literal["user", "job"] | None:
    """Return who stopped the last attempt of a training; None: nobody.

    A STOP file that is still there has not been seen: it counts as well.
    """
    if step.kind != "train":
        return None
    directory = RunDirectory(study_dir / step.run)
    asked_by: str | None
    try:
        # An empty file is by the user: `touch` makes one, and so does `cancel --after-checkpoint`.
        asked_by = directory.stop_file.read_text().strip() or "user"
    except FileNotFoundError:
        status = read_status(directory)
        asked_by = status.asked_by if status else None
    if asked_by is None:
        return None
    return "job" if asked_by.startswith(OURS) or asked_by in SIGNALLED else "user"


def forget_earlier_stops(study_dir: Path, steps: Sequence[Step]) -> None:
    """Remove STOP files of earlier starts, which would end this one."""
    for step in steps:
        stop = RunDirectory(study_dir / step.run).stop_file
        if step.kind == "train" and stop.exists() and stop.read_text().startswith(OURS):
            stop.unlink()


class Advancing:
    """Submits what can start while a command works, whenever its work has come further.

    It does so in a thread: SLURM may take a minute to answer, and the job has to be stopped in
    time.
    """

    def __init__(self, study_dir: Path, outputs: Callable[[], list[str]]) -> None:
        self._study_dir, self._outputs = study_dir, outputs
        self._looked_at = self._advanced_at = time.monotonic()
        self._seen = outputs()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Begin to submit if there is news; called about every second."""
        now = time.monotonic()
        # One thread at a time: calls that SLURM does not answer must not pile up.
        if now - self._looked_at < LOOK_SECONDS or (self._thread and self._thread.is_alive()):
            return
        if not cluster.can_submit():
            return
        self._looked_at, outputs = now, self._outputs()
        if outputs != self._seen or now - self._advanced_at >= ADVANCE_SECONDS:
            # Set before the call: one that fails is made again at the next news, or after a while.
            self._seen, self._advanced_at = outputs, now
            once = (self._study_dir, None, 1)  # another look is to come
            self._thread = threading.Thread(target=advance_at_end, args=once, daemon=True)
            self._thread.start()


def advance_at_end(study_dir: Path, job: str | None, tries: int = TRIES) -> None:
    """Submit what can start once this job has ended; try for minutes, or wait in a full queue."""
    if not cluster.can_submit():
        say("this node has no sbatch or squeue; 'status --watch' on a login node submits the rest")
        return
    for left in reversed(range(tries)):
        try:
            patience = PATIENCE_SECONDS if tries > 1 else 0.0
            submitted = advance(study_dir, ending=job, patience_seconds=patience)
        except (UserError, OSError) as error:
            say(f"nothing was submitted: {line_of(error)}")
            if job and isinstance(error, cluster.SubmitLimitError) and left <= tries - FULL_TRIES:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which SLURM sends it at once
                with contextlib.suppress(UserError):
                    return cluster.requeue(job, REQUEUE_SECONDS)
            if left:
                time.sleep(TRY_SECONDS)
        else:
            if submitted:
                say("submitted " + ", ".join(f"{name} {n}" for name, n in submitted.items()))
            return
