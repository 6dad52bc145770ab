"""The importer beside a run that is training, which never waits for it."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from base.errors import UserError
from study.definition import Study
from study.tracking.importer import mirror_run
from train.run.directory import RunDirectory

NICENESS = 10  # a core that training wants is training's


def _status(directory: RunDirectory) -> dict[str, Any] | None:
    try:
        status: dict[str, Any] = json.loads(directory.status_json.read_text())
    except FileNotFoundError:
        return None
    return status


def follow(directory: Path, study: Study, name: str, uri: str, seconds: float) -> None:
    """Import a run every so many seconds until it has ended or SIGTERM comes, then once more.

    A run has ended when its status.json says so; one that was there before, of an earlier attempt
    that failed or was preempted, does not count. A store that fails is reported in one line and
    tried again the next time.

    Raises:
        UserError: if the last import fails.
    """
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    os.nice(NICENESS)
    run = RunDirectory(directory / name)
    earlier = _status(run)
    while True:
        status = _status(run)
        is_last = stop.is_set() or (
            status is not None and (status["status"] == "done" or status != earlier)
        )
        try:
            added = mirror_run(directory, study, name, uri)
            print(f"{time.strftime('%H:%M:%S')} {name}: {added} metrics added", flush=True)
        except (UserError, OSError) as error:
            if is_last:
                raise
            print(f"{time.strftime('%H:%M:%S')} {name}: {error}", file=sys.stderr, flush=True)
        if is_last:
            return
        stop.wait(seconds)
