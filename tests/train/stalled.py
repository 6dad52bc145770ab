"""Commands that wait for their data: `-m tests.train.stalled train run RUN_DIR`, see `stalling`.

A test that does something to a command in its middle needs it to be there still, however fast the
machine is. Workers that are spawned import this file as their main module, so their data stop, too.
"""

import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from base import stopping
from train.averages import Averages
from train.data.batches import Batch, Replica
from train.data.documents import TextFile
from train.run_data import RunData

NAMES = ("STEP", "SAVE", "SOURCE", "UNTIL")
STEP, SAVE, SOURCE, UNTIL = (f"QUANTDYN_TEST_STALLED_{name}" for name in NAMES)


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


def _wait() -> None:
    while not (Path(os.environ[UNTIL]).exists() or stopping.requested(None)):
        time.sleep(0.005)


_batch, _update, _texts = RunData.batch, Averages.update, TextFile.texts


def _stalled_batch(data: RunData, step: int, replica: Replica | None = None) -> Batch:
    if step >= int(os.environ[STEP]):
        _wait()
    return _batch(data, step, replica)


def _stalled_update(averages: Averages, step: int) -> None:
    if step >= int(os.environ[SAVE]):
        _wait()
    _update(averages, step)


def _stalled_texts(source: TextFile) -> Iterator[str]:
    if str(source.path) == os.environ[SOURCE]:
        _wait()
    return _texts(source)


if STEP in os.environ:
    RunData.batch = _stalled_batch  # type: ignore[assignment, method-assign]
if SAVE in os.environ:
    Averages.update = _stalled_update  # type: ignore[assignment, method-assign]
if SOURCE in os.environ:
    TextFile.texts = _stalled_texts  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")
