"""The importer beside a run that is training: it reads the run's files, and samples the node that it runs on.

Training never waits for it: it has no part in the run's processes, and of the run's files it writes none but its own
`system-HOST.jsonl`. One on every node samples every node; they may all import.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from study.settings import Study
from study.tracking.importer import mirror_run
from study.tracking.points import system_file
from train.command import UserError
from train.run_directory import RunDirectory

NICENESS = 10  # a core that training wants is training's
NVIDIA_SMI_SECONDS = 20


def sample_node() -> dict[str, float]:
    """Figures of this node since the last call, by the names that MLflow gives them; GPUs where nvidia-smi is."""
    memory = psutil.virtual_memory()
    found = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / 1e6,
        "system_memory_usage_percentage": 100 * memory.used / memory.total,
    }
    return found | _sample_gpus()


def _sample_gpus() -> dict[str, float]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = "--query-gpu=index,utilization.gpu,memory.used,memory.total,power.draw"
    command = [program, query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=False)
    except subprocess.TimeoutExpired:  # a driver that hangs; the gap in the figures shows it
        return {}
    found: dict[str, float] = {}
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        index, *cells = (cell.strip() for cell in line.split(","))
        used, total = cells[1:3]
        figures = {"utilization_percentage": cells[0], "power_usage_watts": cells[3]}
        found |= {f"gpu_{index}_{name}": float(cell) for name, cell in figures.items() if _is_number(cell)}
        if _is_number(used) and _is_number(total):
            found[f"gpu_{index}_memory_usage_megabytes"] = float(used) * 2**20 / 1e6  # nvidia-smi counts MiB
            found[f"gpu_{index}_memory_usage_percentage"] = 100 * float(used) / float(total)
    return found


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).isdigit()  # else '[N/A]' or '[Not Supported]'


def _append_sample(directory: RunDirectory) -> None:
    host = socket.gethostname()
    with system_file(directory, host).open("a") as file:
        file.write(json.dumps({"time": time.time(), "host": host} | sample_node()) + "\n")


def _status(directory: RunDirectory) -> dict[str, Any] | None:
    try:
        status: dict[str, Any] = json.loads(directory.status_json.read_text())
    except FileNotFoundError:
        return None
    return status


def follow(directory: Path, study: Study, name: str, uri: str, seconds: float) -> None:
    """Imports a run every so many seconds until it has ended or SIGTERM comes, then once more.

    A run has ended when its status.json says so; one that was there before, of an earlier attempt that failed or was
    preempted, does not count. A store that fails is told of in one line and tried again the next time.

    Raises:
        UserError: if the last import fails.
    """
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    os.nice(NICENESS)
    psutil.cpu_percent()  # it counts from the call before
    run = RunDirectory(directory / name)
    earlier = _status(run)
    while True:
        status = _status(run)
        is_last = stop.is_set() or (status is not None and (status["status"] == "done" or status != earlier))
        if run.path.is_dir():
            _append_sample(run)
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
