"""`python -m tests.gpu`: all checks on the GPU of this machine, one process each, at most 15
minutes.

Prints the table of figures and writes gpu_report.json; exit code 1 if a figure is outside its
limit. Where there is no GPU it says so, and is done. `--device cpu` rehearses it in small.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from base.environment import PROJECT, software, version, version_line
from tests.gpu.checks import checks, run
from tests.gpu.figures import table
from tests.gpu.workbench import FORKS, FULL, IN_SMALL, Workbench

TOTAL_SECONDS = 900
PROBE = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


def machine(gpu: str) -> dict[str, Any]:
    """Return the machine that the figures were measured on."""
    return {
        "gpu": gpu,
        PROJECT: version(),
        "python": platform.python_version(),
        **software(),
        "cpus": os.cpu_count(),
    }


def device_name(device: str) -> str:
    """The GPU's name or nothing, by a process of its own: what asks CUDA cannot fork."""
    if device == "cpu":
        return "no GPU, a rehearsal in small"
    probe = [sys.executable, "-c", PROBE]
    return subprocess.run(probe, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Runs all checks where there is a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_report.json"), help="where the figures are written"
    )
    parser.add_argument("--only", default="", help="checks whose name this expression is found in")
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_SECONDS, help="of all checks; the rest are failed"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal in small"
    )
    parser.add_argument("--version", action="store_true", help="show versions and exit")
    arguments = parser.parse_args()
    if arguments.version:
        print(version_line())
        return 0
    gpu = device_name(arguments.device)
    if not gpu:
        print("skipped as a whole: torch sees no GPU here, so nothing of tests/gpu was run")
        return 0
    FORKS.set_forkserver_preload(["torch", "transformers.models.olmo2.modeling_olmo2"])
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        sizes = FULL if arguments.device == "cuda" else IN_SMALL
        workbench = Workbench(arguments.device, sizes, Path(work))
        names = [name for name in checks(workbench) if re.search(arguments.only, name)]
        if not names:
            parser.error(
                f"--only {arguments.only}: no check; there are {', '.join(checks(workbench))}"
            )
        figures = run(workbench, names, arguments.seconds)
    seconds = time.monotonic() - began_at
    report = {
        "machine": machine(gpu),
        "seconds": seconds,
        "figures": [figure.described() for figure in figures],
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(figures))
    failed, skipped = (
        sum(figure.verdict == verdict for figure in figures) for verdict in ("FAILED", "skipped")
    )
    print(
        f"{len(figures) - skipped} figures on {gpu} in {seconds:.0f} s, {failed} failed;"
        f" {skipped} checks not run, for the reasons above -> {arguments.out}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
