"""A stand-in for sys.executable: a program in a fork of a process after its imports.

Commands that start commands (a study, its steps, torchrun, the ranks) spend most of a small test on
importing torch, once for each process. `interpreter` is a program that takes the place of the
interpreter: it asks a server for a fork with its arguments, environment, directory and open files,
hands on the signals that it gets and ends as the fork ended. Killed, it takes the fork with it.
It takes `-m` and `-c`, after `-u` (torchrun's ranks) or `-B` (multiprocessing's servers); all else
it leaves to the real interpreter, and what names another hub, which is read at an import.

`python -m tests.interpreter LISTENER` is the server. All workers of pytest share one. They are forks
too, of a fork that has imported the tests (`workers`).
"""

import atexit
import ctypes
import json
import multiprocessing
import os
import resource
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType

from base.forks import run_and_leave

PLACE = "QUANTDYN_TEST_INTERPRETER"  # variable: the directory of the program of all workers
FIRST_FREE = 500  # files of the fork are collected above this number
_living: list[object] = []  # connections that live as long as this process
NAMESPACES = {"mnt": 0x00020000, "uts": 0x04000000, "pid": 0x20000000}
PROGRAM = """#!{link} -IS
import ctypes, json, os, signal, socket, struct, sys
while sys.argv[1] in ("-u", "-B"):
    if sys.argv.pop(1) == "-u":
        os.environ["PYTHONUNBUFFERED"] = "1"
if sys.argv[1] not in ("-m", "-c") or "HF_ENDPOINT" in os.environ:
    os.execv("{python}", ["{python}", *sys.argv[1:]])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
server = socket.socket(socket.AF_UNIX)
files = []
for name in os.listdir("/proc/self/fd"):
    if int(name) != server.fileno() and os.path.exists("/proc/self/fd/" + name):
        files.append(int(name))
asked = [sys.argv[1:], dict(os.environ), os.getcwd(), files, sys.argv[0]]
asked = json.dumps(asked).encode("utf-8", "surrogateescape")
pending = []
def hand_on(number, _):
    try:
        server.send(bytes([number]))
    except OSError:
        pending.append(number)
for number in (1, 2, 3, 10, 12, 15):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, hand_on)
server.connect("\\0{address}")
socket.send_fds(server, [struct.pack("i", len(asked))], files)
server.sendall(asked)
for number in pending:
    server.send(bytes([number]))
server.recv(4)  # the fork's process id
ended = server.recv(4)
status = struct.unpack("i", ended)[0] if len(ended) == 4 else 9
if status & 127:
    signal.signal(status & 127, signal.SIG_DFL) if status & 127 != 9 else None
    os.kill(os.getpid(), status & 127)
os._exit(os.waitstatus_to_exitcode(status))
"""


def interpreter() -> str:
    """Return the path of the program."""
    return f"{_place()}/python"


def share() -> None:
    """Start the server of this process and of all that it starts."""
    os.environ[PLACE] = _place()


def workers(tests: list[str]) -> str:
    """Return the program whose forks have imported these tests; it takes the place of `interpreter`.

    Its server is a fork itself, of `tests.collected`, which lives as long as this process.
    """
    share()  # with --tx alone, nobody has
    program = Path(f"{_place()}/worker")
    listener, nothing = _listener(program), os.open(os.devnull, os.O_RDWR)
    files = {0: nothing, 1: nothing, 2: nothing, 3: listener.fileno()}
    _living.append(fork(["-m", "tests.collected", *tests], dict(os.environ), Path.cwd(), files))
    return str(program)


def real_interpreter() -> str:
    """Return what the program stands in for."""
    return str((Path(_place()) / "real").readlink())


def fork(
    arguments: list[str], environment: dict[str, str], cwd: Path, files: dict[int, int]
) -> tuple[socket.socket, int]:
    """Return a connection to the server and the process id of a fork that runs the arguments.

    What is sent are numbers of signals, a byte each; what is received at the end is the fork's
    status, as an int. A connection that is closed kills it.

    Args:
        arguments: of the interpreter: -m MODULE or -c PROGRAM, and more.
        environment: of the fork.
        cwd: its directory.
        files: its open files: number there and here.
    """
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"\0{interpreter()}")
    asked = json.dumps([arguments, environment, str(cwd), list(files), interpreter()]).encode()
    socket.send_fds(server, [struct.pack("i", len(asked))], list(files.values()))
    server.sendall(asked)
    return server, struct.unpack("i", server.recv(4))[0]


@cache
def _place() -> str:
    """Return the directory of the program, whose name is the address of its server."""
    if PLACE in os.environ:
        return os.environ[PLACE]
    directory = tempfile.mkdtemp(prefix="quantdyn-python-")
    atexit.register(shutil.rmtree, directory)
    (Path(directory) / "real").symlink_to(sys.executable)
    with _listener(Path(directory) / "python") as listener:
        subprocess.Popen(
            [sys.executable, "-m", "tests.interpreter", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parent.parent,
        )
    return directory


def _listener(program: Path) -> socket.socket:
    """Return where the forks of a program are asked for, after writing the program."""
    # by a link: the first line of a program has no place for an interpreter's path with a space
    link = program.with_name("real")
    program.write_text(PROGRAM.format(link=link, python=sys.executable, address=program))
    program.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{program}")
    listener.listen(64)  # who asks before the server has imported all waits
    return listener


def serve(listener: socket.socket) -> None:
    """Fork for whoever connects, until this process is killed."""
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            if key.data is None:
                asker, _ = listener.accept()
                with suppress(ConnectionError, struct.error):
                    pid = _forked(asker)
                    asker.send(struct.pack("i", pid))
                    exited = os.pidfd_open(pid)
                    for file in (asker, exited):
                        selector.register(file, selectors.EVENT_READ, (pid, asker, exited))
                continue
            pid, asker, exited = key.data
            if asker.fileno() == -1:
                continue  # its fork ended a moment ago
            if key.fileobj == asker:
                numbers = _received(asker)
                for number in numbers or bytes([signal.SIGKILL]):
                    os.kill(pid, number)
                if not numbers:
                    selector.unregister(asker)
                continue
            _, status = os.waitpid(pid, 0)
            with suppress(OSError):
                asker.send(struct.pack("i", status))
            selector.unregister(exited)
            with suppress(KeyError):
                selector.unregister(asker)
            os.close(exited)
            asker.close()


def _received(asker: socket.socket) -> bytes:
    try:
        return asker.recv(64)
    except ConnectionError:
        return b""


def _forked(asker: socket.socket) -> int:
    """Return the process id of a fork that runs what `asker` asks for."""
    header, files, _, _ = socket.recv_fds(asker, 4, 250)
    (size,) = struct.unpack("i", header)
    asked = b""
    while len(asked) < size:
        asked += asker.recv(size - len(asked)) or exit_with(ConnectionError("it is gone"))
    arguments, environment, cwd, numbers, program = json.loads(asked)
    who, _, _ = struct.unpack("3i", asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    pid = os.fork()
    if pid == 0:
        taken = dict(zip(numbers, files, strict=True))
        run_and_leave(lambda: _run(arguments, environment, cwd, taken, program, who))
    for file in files:
        os.closerange(file, file + 1)  # raises nothing: an error is of what a fork wrote there
    return pid


def exit_with(error: Exception) -> bytes:
    """Raise, where an expression is wanted."""
    raise error


def _run(
    arguments: list[str],
    environment: dict[str, str],
    cwd: str,
    files: dict[int, int],
    program: str,
    who: int,
) -> None:
    """Become, in the fork, the program of the arguments."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    try:
        limits = Path(f"/proc/{who}/limits").read_text()
        status = Path(f"/proc/{who}/status").read_text()
        _enter_namespaces(who)
        _become_user(status)
    except (FileNotFoundError, ProcessLookupError):  # it was killed a moment after it asked
        os._exit(1)
    _take_limit(limits)
    _take(files)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [cwd, *paths]
    sys.argv, sys.executable = arguments[1:], program
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            line_buffering=stream is sys.stderr or stream.isatty(), write_through=unbuffered
        )
    _set_what_is_read_at_import(environment, program)
    atexit._clear()
    if arguments[0] == "-m":
        runpy.run_module(sys.argv[0], None, "__main__", True)
    else:
        main = sys.modules["__main__"] = ModuleType("__main__")
        written, sys.argv[0] = sys.argv[0], "-c"
        exec(written, main.__dict__)


def _set_what_is_read_at_import(environment: dict[str, str], program: str) -> None:
    """Let variables act that libraries read when they are imported, which has been done."""
    import huggingface_hub.constants
    import torch._dynamo.config

    multiprocessing.set_executable(program)
    torch._dynamo.config.disable = environment.get("TORCHDYNAMO_DISABLE") == "1"
    huggingface_hub.constants.HF_HUB_OFFLINE = environment.get("HF_HUB_OFFLINE") == "1"


def _enter_namespaces(who: int) -> None:
    """Join the namespaces of the process that asked: a node of the SLURM lab has its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    others = [
        name
        for name in NAMESPACES
        if not Path(f"/proc/{who}/ns/{name}").samefile(f"/proc/self/ns/{name}")
    ]
    files = {name: os.open(f"/proc/{who}/ns/{name}", os.O_RDONLY) for name in others}
    for name, file in files.items():
        if libc.setns(file, NAMESPACES[name]):
            raise OSError(ctypes.get_errno(), f"no way into the {name} namespace of {who}")
        os.close(file)
    if "pid" in others:  # only children are in it
        _wait_for(os.fork())


def _take_limit(limits: str) -> None:
    """Limit the size of files as the process that asked is limited, by its limits in /proc."""
    (line,) = (line for line in limits.splitlines() if line.startswith("Max file size"))
    both = [int(word) if word.isdigit() else resource.RLIM_INFINITY for word in line.split()[3:5]]
    resource.setrlimit(resource.RLIMIT_FSIZE, (both[0], both[1]))


def _become_user(status: str) -> None:
    """Take umask, user and groups of the process that asked, by its status in /proc."""
    fields = dict(line.split(":", 1) for line in status.splitlines())
    os.umask(int(fields["Umask"], 8))
    user, group = (int(fields[name].split()[0]) for name in ("Uid", "Gid"))
    if user != os.getuid():
        os.setgroups([int(number) for number in fields["Groups"].split()])
        os.setgid(group)
        os.setuid(user)
        # What a change of the user takes away: the signal at the parent's end, and /proc/self.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        ctypes.CDLL(None).prctl(4, 1)


def _wait_for(pid: int) -> None:
    """Return in the child; in the parent, end as the child ended, and hand on signals before."""
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        return

    def hand_on(number: int, _: object) -> None:
        with suppress(ProcessLookupError):  # it ended a moment ago
            os.kill(pid, number)

    for number in (1, 2, 3, 10, 12, 15):
        signal.signal(number, hand_on)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if code != -signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _take(files: dict[int, int]) -> None:
    """Give the received files their numbers and close all others."""
    high = FIRST_FREE
    moved = {}
    for number, file in files.items():
        os.dup2(file, high)
        moved[number], high = high, high + 1
    os.closerange(0, FIRST_FREE)
    for number, file in moved.items():
        os.dup2(file, number)
        os.closerange(file, file + 1)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # with the process that started it
    os.setsid()

    import tests.preloaded  # noqa: F401

    # The other thread is that of pyarrow's allocator, which is ready for forks.
    warnings.filterwarnings("ignore", message=r"This process .* is multi-threaded")
    serve(socket.socket(fileno=int(sys.argv[1])))
