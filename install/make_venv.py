"""`make venv`: checks of this machine, then .venv, each part with its seconds.

`python3 -m install.make_venv [NAME=VALUE ...]` runs under the Python that .venv is made with.
"""

from __future__ import annotations  # older Pythons, which are refused, read this file too

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from install import machine, packages
from install.download import Download
from install.settings import CUDA_OF, RefusedError, VenvSettings, locked, read, requirements

VENV = Path(".venv")
STAMP, TEMPORARY = VENV / "complete", VENV / "tmp"
QUIET_SECONDS = 9  # then a line says how far what runs is: none is later than 10 s after another
TICK_SECONDS = 0.2
MB, GB = 10**6, 10**9


class Clock:
    """The parts of an installation, printed as they begin, and how far the newest one is."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, float]] = []
        self.progress: Callable[[], str] = self._grown
        self._printed = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> Clock:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    @property
    def seconds(self) -> float:
        """Seconds since the newest part began."""
        return time.monotonic() - self.begun[-1][1]

    def begin(self, part: str) -> None:
        """Print that a part begins."""
        self.begun.append((part, time.monotonic()))
        self.progress = self._grown
        self._show(part)

    def _show(self, text: str) -> None:
        """Print a line with the seconds since the first part."""
        with self._lock:
            self._printed = time.monotonic()
            print(f"{self._printed - self.begun[0][1]:5.0f} s  {text}", flush=True)

    def _watch(self) -> None:
        """Print how far it is wherever nothing was printed for a while."""
        while not self._ended.wait(TICK_SECONDS):
            if self.begun and time.monotonic() - self._printed > QUIET_SECONDS:
                self._show(f"  {self.progress()}")

    def _grown(self) -> str:
        """Return what is being done, and how large .venv is by now."""
        return f"{self.begun[-1][0].partition(':')[0]}: .venv has {size(VENV) / MB:,.0f} MB"

    def summary(self) -> str:
        """Return the seconds of all parts together and of each."""
        ends = [start for _, start in self.begun[1:]] + [time.monotonic()]
        parts = [
            f"{part.partition(':')[0]} {end - start:.0f}"
            for (part, start), end in zip(self.begun, ends, strict=True)
        ]
        return f"installing took {ends[-1] - self.begun[0][1]:.0f} s: {', '.join(parts)}"


def main(words: list[str]) -> None:
    """Build .venv, or end with one line and exit code 2."""
    try:
        settings = read(words)
        check(settings)
        with Clock() as clock:
            build(settings, clock)
    except RefusedError as refused:
        print(f"error: {refused}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("error: stopped; run make again", file=sys.stderr)
        sys.exit(130)


def check(settings: VenvSettings) -> None:
    """Raise RefusedError where .venv could not be built, or torch would not start."""
    here = None if settings.build not in CUDA_OF else machine.installed_driver()
    problem = (
        machine.machine_problem(settings, VENV)
        or machine.driver_problem(here, settings)
        or machine.system_torch_problem(settings)
    )
    if problem:
        raise RefusedError(problem)
    if note := machine.driver_note(here, settings):
        print(note, flush=True)


def build(settings: VenvSettings, clock: Clock) -> None:
    """Make .venv, install and import what it holds, and write the stamp of a complete one."""
    clock.begin(f"environment: Python {sys.version.split()[0]} ({sys.executable})")
    STAMP.unlink(missing_ok=True)
    python = make_environment(settings)
    pins = TEMPORARY / "requirements.txt"
    pins.write_text("\n".join(requirements(settings)) + "\n", encoding="utf-8")

    install(settings, python, pins, clock)

    clock.begin("import: torch, megatron-core, deepspeed, gptqmodel")
    log = VENV / "import.log"
    command = [python, "-m", "install.verify", str(pins), "1" if settings.system_torch else ""]
    if run(command, log, packages.environment(settings, TEMPORARY), clock) != 0:
        raise RefusedError(f"{last_line(log)} ({log}); run make again")

    shutil.rmtree(TEMPORARY)
    print(clock.summary(), flush=True)
    count = len(requirements(settings))
    print(f"{VENV.resolve()}: {size(VENV) / GB:.1f} GB, {count} packages", flush=True)
    python_version = f"PYTHON={sys.version_info[0]}.{sys.version_info[1]}"
    STAMP.write_text(f"{settings.stamp} {python_version}\n", encoding="utf-8")


def make_environment(settings: VenvSettings) -> str:
    """Make an empty .venv and return its Python."""
    shared = ["--system-site-packages"] if settings.system_torch else []
    subprocess.run([sys.executable, "-m", "venv", "--clear", *shared, str(VENV)], check=True)
    TEMPORARY.mkdir()
    python = str(VENV / "bin" / "python")
    if settings.system_torch:
        machine.share_system_torch(python)
    return python


def install(settings: VenvSettings, python: str, pins: Path, clock: Clock) -> None:
    """Download and unpack the pins."""
    uv, why = packages.installer(settings, python, TEMPORARY)
    tool = "uv" if uv else "pip"
    count = len(pins.read_text(encoding="utf-8").split())
    gigabytes, torch = contents(settings)
    clock.begin(f"download: {count} packages by {tool} ({why}), {gigabytes:g} GB, {torch}")

    log = VENV / "install.log"
    command = packages.command(uv, settings, python, pins)
    download = Download(gigabytes * GB, TEMPORARY)
    if run(command, log, packages.environment(settings, TEMPORARY), clock, download) != 0:
        sys.stderr.write("".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[-12:]))
        other = " (with pip: make INSTALLER=pip)" if uv else ""
        raise RefusedError(f"{tool} did not install everything ({log}); run make again{other}")


def contents(settings: VenvSettings) -> tuple[float, str]:
    """Return how many GB are downloaded, and which torch .venv gets."""
    if settings.system_torch:
        return 0.8, f"beside {machine.system_torch_description()}"
    if settings.build in CUDA_OF:
        return 3, f"with torch {locked('torch')} for CUDA {CUDA_OF[settings.build][0]}"
    return 0.9, f"with torch {locked('torch')} without CUDA"


def size(folder: Path) -> int:
    """Return the bytes on disk of a folder."""
    command = [shutil.which("du") or "du", "-sk", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return 1024 * int(done.stdout.split()[0]) if done.stdout else 0


def run(
    command: list[str],
    log: Path,
    environment: dict[str, str],
    clock: Clock,
    download: Download | None = None,
) -> int:
    """Run a command with its output in a log and return its exit code; the clock shows its parts
    and how far they are.
    """
    with log.open("w", encoding="utf-8") as output, log.open(encoding="utf-8") as lines:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        while process.poll() is None:
            time.sleep(TICK_SECONDS)
            for line in lines:
                for words, part in packages.LAST_PHASES.items():
                    if line.startswith(words):
                        clock.begin(part)
                if download:
                    download.read(line)
                if download and download.underway:
                    clock.progress = lambda: download.words(clock.seconds)
                elif packages.TELLING.match(line):
                    clock.progress = line.strip()[:90].__str__
    return process.returncode


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    return (log.read_text(encoding="utf-8").splitlines() or ["nothing was printed"])[-1]


if __name__ == "__main__":
    main(sys.argv[1:])
