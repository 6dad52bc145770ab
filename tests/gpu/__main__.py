"""`python -m tests.gpu`: all checks on the GPU of this machine, one process each, within 10
minutes; with `--gpus N` those that need several.

Prints the table of figures and writes a report; exit code 1 if a figure is outside its limit, or if
the time was over before all checks were made. Without a GPU it says so, and is done; fewer than N
are refused. `--device cpu` rehearses it in small. `--base` times training steps of an older commit
beside those of this tree.
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
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from base.environment import PROJECT, software, version, version_line
from base.errors import UserError
from tests.gpu.checks import Outcome, run, table_of
from tests.gpu.figures import table
from tests.gpu.speed import tree_of
from tests.gpu.workbench import FORKS, FULL, IN_SMALL, Workbench

TOTAL_SECONDS = 600
NUMBERS = (1, 2, 4, 8)  # of GPUs: the layouts of the checks divide over them
PROBE = (
    "import torch; [print(torch.cuda.get_device_name(n)) for n in range(torch.cuda.device_count())]"
)


def machine(gpus: list[str]) -> dict[str, Any]:
    """Return the machine that the figures were measured on."""
    return {
        "gpu": gpus[0],
        "gpus": len(gpus),
        PROJECT: version(),
        "python": platform.python_version(),
        **software(),
        "cpus": os.cpu_count(),
    }


def names_of_gpus(device: str, wanted: int) -> list[str]:
    """Return the names of all GPUs, by a process of its own: what asks CUDA cannot fork."""
    if device == "cpu":
        return ["no GPU, a rehearsal in small"] * wanted
    probe = [sys.executable, "-c", PROBE]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def expression(text: str) -> re.Pattern[str]:
    """Return a regular expression; ArgumentTypeError if it is none."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text} is no regular expression ({error})") from None


def parser() -> argparse.ArgumentParser:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument(
        "--gpus", type=int, choices=NUMBERS, default=1, help="above 1: the checks for several"
    )
    parser.add_argument(
        "--base", help="a commit, or a directory with its tree, whose steps are timed as well"
    )
    parser.add_argument(
        "--out", type=Path, help="where the figures are written: gpu_report.json, or gpus_"
    )
    parser.add_argument(
        "--only", type=expression, default="", help="checks whose name this expression is found in"
    )
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_SECONDS, help="of all checks; the rest is not run"
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal in small"
    )
    parser.add_argument("--version", action="store_true", help="show versions and exit")
    return parser


def main() -> int:
    """Run all checks where there are GPUs for them."""
    options = parser()
    arguments = options.parse_args()
    if arguments.version:
        print(version_line())
        return 0
    wanted = arguments.gpus
    gpus = names_of_gpus(arguments.device, wanted)
    if wanted > len(gpus):
        if wanted == 1:
            print("skipped as a whole: torch sees no GPU here, so nothing of tests/gpu was run")
            return 0
        options.exit(
            2,
            f"error: these checks need {wanted} GPUs, and torch sees {len(gpus)} here;"
            " give fewer, or run make test-gpu\n",
        )

    FORKS.set_forkserver_preload(["torch", "transformers.models.olmo2.modeling_olmo2"])
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        sizes = FULL if arguments.device == "cuda" else IN_SMALL
        workbench = Workbench(arguments.device, sizes, Path(work), gpus=wanted)
        if arguments.base:
            try:
                tree = tree_of(arguments.base, Path(work) / "base")
            except UserError as error:
                options.exit(2, f"error: {error}\n")
            workbench = replace(workbench, base=tree)
        checks = table_of(workbench)
        rows = [check for check in checks if arguments.only.search(check.name)]
        if not rows:
            names = ", ".join(check.name for check in checks)
            options.error(f"--only {arguments.only.pattern}: no check; there are {names}")
        outcomes = run(workbench, rows, arguments.seconds)
    return report(arguments, gpus[:wanted], outcomes, time.monotonic() - began_at)


def report(
    arguments: argparse.Namespace, gpus: list[str], outcomes: list[Outcome], seconds: float
) -> int:
    """Print the table, write the report, and return the exit code."""
    figures = [figure for outcome in outcomes for figure in outcome.figures]
    out = arguments.out or Path("gpu_report.json" if len(gpus) == 1 else "gpus_report.json")
    content = {
        "machine": machine(gpus),
        "seconds": seconds,
        "base": arguments.base,
        "checks": [
            {"name": check.name, "seconds": taken, "expected_seconds": check.seconds}
            for check, taken, _ in outcomes
        ],
        "figures": [figure.described() for figure in figures],
    }
    out.write_text(json.dumps(content, indent=1) + "\n")

    print(table(figures))
    verdicts = Counter(figure.verdict for figure in figures)
    measured = len(figures) - verdicts["skipped"] - verdicts["NOT RUN"]
    where = gpus[0] if len(gpus) == 1 else f"{len(gpus)} x {gpus[0]}"
    print(
        f"{measured} figures on {where} in {seconds:.0f} s, {verdicts['FAILED']} failed;"
        f" {verdicts['skipped']} checks skipped, for the reasons above; {verdicts['NOT RUN']} NOT"
        f" RUN within {arguments.seconds:.0f} s -> {out}"
    )
    return 1 if verdicts["FAILED"] or verdicts["NOT RUN"] else 0


if __name__ == "__main__":
    sys.exit(main())
