"""What every command of this project shares: one-line errors, exit codes and progress with an ETA."""

import os
import signal
import sys
import time
from types import TracebackType

import typer
from pydantic import ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from train import stopping

PLAIN_LINE_EVERY_SECONDS = 10.0
SILENCE_OF_OTHER_RANKS_SECONDS = 5.0  # torchrun ends them within a second of rank 0, later on a busy machine


class UserError(ValueError):
    """Bad input. The message is one line that names the next action; the command exits with code 2."""


def explain_validation(source: str, error: ValidationError) -> UserError:
    """The first problem pydantic found in `source`, as one line that names the key."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"]) or "the whole file"
    if problem["type"] == "extra_forbidden":
        return UserError(f"{source}: unknown key '{key}'; remove it or correct its spelling")
    if problem["type"] == "missing":
        return UserError(f"{source}: key '{key}' is missing; add it")
    reason = problem["msg"].removeprefix("Value error, ")
    return UserError(f"{source}: '{key}': {reason} (got {problem['input']!r:.80}); correct the value")


def is_rank_zero() -> bool:
    """Whether this process speaks for the job: rank 0 of torchrun, or a process on its own."""
    return os.environ.get("RANK", "0") == "0"


def one_process_only(name: str) -> None:
    """UserError under torchrun with several processes, each of which would measure and write everything."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{name} measures in one process; start it without torchrun")


def run_command(app: typer.Typer, name: str) -> None:
    """Runs a command line; a UserError or an OSError ends it with one line on stderr and exit code 2."""
    try:
        app(prog_name=f"python -m {name}")
    except UserError as error:
        _refuse(str(error))
    except OSError as error:  # a path of the wrong kind, without permission, or on a full disk
        place = f"{error.filename}: " if error.filename else ""
        _refuse(f"{place}{error.strerror or error}; correct the path or its permissions, or free space, and run again")


def _refuse(line: str) -> None:
    """Ends this process. Rank 0 speaks; another rank that is still alive a while later met an error of its own."""
    if not is_rank_zero():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # with which torchrun ends those that have nothing to say
        if stopping.terminated():  # it was faster
            os._exit(2)
        time.sleep(SILENCE_OF_OTHER_RANKS_SECONDS)
        line = f"rank {os.environ['RANK']}: {line}"
    print(f"error: {' '.join(line.split())}", file=sys.stderr, flush=True)
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        # A gloo thread that frees its tensors while the interpreter goes down aborts the process with SIGABRT.
        sys.stdout.flush()
        os._exit(2)
    sys.exit(2)


class Progress:
    """A progress bar with ETA on a terminal, a plain line every few seconds otherwise.

    >>> with Progress("export", total=2) as progress:
    ...     progress.advance(loss=3.1)
    """

    def __init__(self, label: str, total: int, done: int = 0) -> None:
        self.label, self.total, self.done = label, total, done
        self._started_at = self._printed_at = time.monotonic()
        self._done_at_start = done
        self._bar: RichProgress | None = None
        if is_rank_zero() and sys.stderr.isatty():
            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._task = self._bar.add_task(label, total=total, completed=done, note="")

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, count: int = 1, **values: float) -> None:
        """Counts `count` more items as done and shows the latest named values."""
        self.done += count
        note = "  ".join(f"{key} {value:.4g}" for key, value in values.items())
        if self._bar:
            self._bar.update(self._task, completed=self.done, note=note)
            return
        now = time.monotonic()
        due = now - self._printed_at >= PLAIN_LINE_EVERY_SECONDS or self.done == self.total
        if due and is_rank_zero():
            self._printed_at = now
            rate = (self.done - self._done_at_start) / max(now - self._started_at, 1e-9)
            eta_seconds = (self.total - self.done) / max(rate, 1e-9)
            print(
                f"{self.label} {self.done}/{self.total}  ETA {eta_seconds:.0f} s  {note}", file=sys.stderr, flush=True
            )
