"""Commands that wait for their data: `-m tests.train.stalled train run RUN_DIR`, see `stalling`.

They also train with buckets of a size, as on GPUs, see `bucketed`.

A test that does something to a command in its middle needs it to be there still, however fast the
machine is. Workers that are spawned import this file as their main module, so their data stop, too.
"""

import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from base import stopping
from base.libraries.private_names import replace
from train.averages import Averages
from train.data.documents import TextFile
from train.run_data import RunData

NAMES = ("STEP", "SAVE", "SOURCE", "UNTIL", "BUCKETS")
STEP, SAVE, SOURCE, UNTIL, BUCKETS = (f"QUANTDYN_TEST_STALLED_{name}" for name in NAMES)


def stalling(
    until: Path, *, step: int | None = None, save: int | None = None, source: Path | None = None
) -> dict[str, str]:
    """Return the environment in which something comes once the file `until` is there.

    A batch, what follows the training of a step, or a text.

    A signal that asks a training to stop lets go of it, too.
    """
    return (
        {UNTIL: str(until)}
        | ({STEP: str(step)} if step else {})
        | ({SAVE: str(save)} if save else {})
        | ({SOURCE: str(source)} if source else {})
    )


def bucketed(elements: int) -> dict[str, str]:
    """Return the environment in which gradients overlap with computation, in buckets of a size."""
    return {BUCKETS: str(elements)}


def _wait() -> None:
    while not (Path(os.environ[UNTIL]).exists() or stopping.requested(None)):
        time.sleep(0.005)


def _stall(owner: type, method: str, variable: str, is_reached: Callable[..., bool]) -> None:
    """Have a method wait where it is reached, if the environment asks for it."""
    if variable not in os.environ:
        return
    plain = getattr(owner, method)

    def stalled(*arguments: Any, **named: Any) -> Any:
        if is_reached(*arguments):
            _wait()
        return plain(*arguments, **named)

    setattr(owner, method, stalled)


_stall(RunData, "batch", STEP, lambda _, step, *__: step >= int(os.environ[STEP]))
_stall(Averages, "update", SAVE, lambda _, step: step >= int(os.environ[SAVE]))
_stall(TextFile, "texts", SOURCE, lambda source: str(source.path) == os.environ[SOURCE])

if BUCKETS in os.environ:
    from train.megatron import data_parallel

    replace(data_parallel, "overlaps", lambda _: True)
    replace(data_parallel, "BUCKET_ELEMENTS", int(os.environ[BUCKETS]))

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")
