"""A process that has imported what measuring and training import, and forks for each command.

Importing torch and transformers takes 6 s of a core, more than most steps of a small study compute.
A fork has them in 0.1 s, and nothing that another command left: nothing is computed here. The
runner starts it (`study.pipeline.processes`) with a socket for standard input. A request is the
words of a command, with the files that become standard input and output of its supervisor, which
is a fork too.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from functools import partial

from base.cli import quick_imports
from base.environment import software
from base.forks import run_and_leave
from study.content import modules
from study.pipeline.supervise import supervise
from study.tracking.store import import_mlflow

IMPORTED = (
    "ckpt_tools.averaging",
    "ckpt_tools.export",
    "curvature.critical.measurement",
    "curvature.measurement",
    "curvature.slices.principal",
    "curvature.step.measurement",
    "mlflow.store.tracking.sqlalchemy_store",
    "quant_eval.rounding.bitsandbytes",
    "quant_eval.measuring.measurement",
    "quant_eval.measuring.outliers",
    "study.report.report",
    "study.results.collect",
    "study.tracking.importer",
    "train.loop",
    "transformers.models.olmo2.modeling_olmo2",
)
MEASURING = {"ckpt_tools", "curvature", "quant_eval"}  # commands that a fork is worth starting for
COMMANDS = MEASURING | {"study", "train"}
READY = b"ready"
REQUEST_BYTES = 100_000


def import_all() -> None:
    """Import what commands need, and look up its versions; no thread is left but pyarrow's.

    That one, of its allocator, is ready for forks; a lock that another thread held would stay
    locked in them.
    """
    with quick_imports():
        with suppress(ImportError):  # the command shows what is wrong where it is looked for
            import_mlflow()
        for name in (*IMPORTED, *modules()):
            with suppress(ImportError):
                importlib.import_module(name)
    software()  # every result names the versions of 200 packages, a second of a core to look up


def _close(files: list[int]) -> None:
    """Close descriptors; an error is of what a command wrote there, and that command's to tell."""
    for file in files:
        os.closerange(file, file + 1)  # unlike `close` it raises nothing


def main() -> None:
    """Import, then fork for each request until the runner is gone."""
    import_all()
    gc.freeze()  # a collection in a fork would copy every page of what is imported
    server = socket.socket(fileno=os.dup(0))
    server.send(READY)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks answer the runner, not this process
    while True:
        request, files, _, _ = socket.recv_fds(server, REQUEST_BYTES, 2)
        # End-of-file: the runner is gone.
        if not request:
            return
        # The child leaves the loop and becomes the command; the parent waits for the next request.
        if os.fork() == 0:
            break
        _close(files)
    # Ignored, the kernel would reap the command, and `waitpid` in `supervise` would fail.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server.close()
    # Ctrl-C reaches the runner alone, as for commands that it starts itself.
    os.setsid()
    # The leash becomes standard input, the log both standard output and standard error.
    for file, number in zip((*files, files[1]), range(3), strict=True):
        os.dup2(file, number)
    _close(files)
    _, _, module, *arguments = json.loads(request)
    sys.argv[1:] = arguments
    program = partial(runpy.run_module, module, run_name="__main__", alter_sys=True)
    run_and_leave(lambda: supervise(lambda: run_and_leave(program)))  # both are forks


if __name__ == "__main__":
    main()
