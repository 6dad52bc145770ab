"""A program in a fork that leaves ends as the interpreter ends it."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.interpreter import real_interpreter

PROGRAMS = {
    "returns": "print('out')",
    "exits": "import sys; print('out'); sys.exit()",
    "exits with a number": "import sys; sys.exit(3)",
    "exits with more than a byte": "import sys; sys.exit(258)",
    "exits with a text": "import sys; print('out'); sys.exit('why')",
    "raises": "print('out'); raise ValueError('why')",
    "is interrupted": "print('out'); raise KeyboardInterrupt",
    "has a thread": (
        "import threading, time\n"
        "def late(): time.sleep(0.3); print('late')\n"
        "threading.Thread(target=late).start(); print('first')"
    ),
    "has a daemon": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    ),
    "has a call at its end": "import atexit; atexit.register(print, 'end'); print('first')",
    "ends badly": "import atexit; atexit.register(lambda: 1 / 0); atexit.register(print, 'end')",
}
FORK = """
import os, sys, threading
from base.forks import run_and_leave
if os.fork():
    code = os.waitstatus_to_exitcode(os.wait()[1])
    os.kill(os.getpid(), -code) if code < 0 else os._exit(code)
run_and_leave(lambda: exec(sys.argv[1], {}))
"""


def ended(*words: str, out: str = "") -> tuple[int, str, str]:
    """Status, output, and the last line of the errors, of a real interpreter."""
    done = subprocess.run(
        ["bash", "-c", f'env -u PYTHONUNBUFFERED "$@"{out}', "bash", real_interpreter(), *words],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    return done.returncode, done.stdout, "".join(done.stderr.splitlines()[-1:])


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_fork_ends_as_the_interpreter_does(name):
    program = PROGRAMS[name]
    expected = ended("-c", program)
    assert ended("-c", FORK, program) == expected
    if name == "is interrupted":
        assert expected[0] == -signal.SIGINT


def test_what_the_output_does_not_take_is_an_error():
    program = "print('out', end='')"
    assert ended("-c", program, out=" > /dev/full")[0] == 120
    assert ended("-c", FORK, program, out=" > /dev/full")[0] == 120


def test_nothing_that_a_fork_shares_is_freed_at_its_end():
    """A finalizer of what the parent made would run at an interpreter's own end."""
    made = "class A:\n    def __del__(self): print('freed', flush=True)\n"
    parent = FORK.replace("import os", made + "kept = A()\nimport os", 1)
    assert ended("-c", made + "kept = A()")[1] == "freed\n"
    assert ended("-c", parent, "print('ran')")[1] == "ran\n"
