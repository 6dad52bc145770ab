"""A fuzzer over every reader: damaged input is refused in one line, or it is valid input.

The same seeds draw the same damages. Anything but UserError, or OSError, of which a command makes
one line as well, is a finding: any other error, seconds of CPU, or gigabytes of memory.
"""

import resource
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from base.errors import UserError
from tests.fuzz.readers import READERS, Reader, Sources

MOST_SECONDS = 5.0  # of CPU, for input of kilobytes
MORE_BYTES = 3 << 30  # of address space than before: threads of torch map some


class TooLongError(Exception):
    """A reader that does not come to an end."""


@contextmanager
def _bounded() -> Iterator[None]:
    """Bound the memory of the block, and end what computes for too long."""

    def stop(_signal, _frame):
        raise TooLongError

    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, stop)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGVTALRM, handler)


def _finding(reader: Reader, directory: Path) -> str | None:
    """The fault of a reader with the input that is there; None: it has none."""
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 * MOST_SECONDS)
    try:
        reader.read(directory)
    except UserError:
        pass
    except OSError as error:
        if not error.strerror:
            return f"OSError without a reason: {error}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        last = traceback.extract_tb(error.__traceback__)[-3:]
        frames = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in last[::-1])
        return f"{type(error).__name__}: {str(error)[:150]!r} at {frames}"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    seconds = time.process_time() - begin
    return f"{seconds:.1f} s" if seconds > MOST_SECONDS else None


def _findings(name: str, directory: Path, sources: Sources, cases: int) -> list[str]:
    reader = READERS[name]
    files = reader.make(directory, sources)
    valid = {path: path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}
    reader.read(directory)  # the valid input
    findings: dict[str, str] = {}
    with _bounded():
        for number in range(cases):
            random = Random(f"{name} {number}")
            path = files[number % len(files)]
            damaged = reader.mutate(random, valid[path])
            path.write_bytes(damaged)
            if finding := _finding(reader, directory):
                findings.setdefault(finding[:30] + finding[-30:], f"{number}: {finding}")
            for other, content in valid.items():
                if not other.is_file() or other.read_bytes() != content:
                    other.write_bytes(content)
    return list(findings.values())


@pytest.fixture(scope="module")
def sources(hf_dir, tokenizer_dir, train_prefix, trained) -> Sources:
    return Sources(hf_dir, tokenizer_dir, train_prefix, trained("dp1"))


@pytest.mark.parametrize("cases", [25, pytest.param(2000, marks=pytest.mark.stress)])
@pytest.mark.parametrize("name", READERS)
def test_damaged_input_is_refused_in_one_line_or_valid(name, cases, tmp_path, sources):
    findings = _findings(name, tmp_path, sources, cases)
    assert not findings, "\n".join(findings)
