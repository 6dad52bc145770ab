"""make bench: what our code costs against a peer on the same model, batch and machine, in one run.

Figures are medians of ratios of neighbouring runs (A B A B ...), so they hold on a machine whose
speed drifts. One thread. Nothing here is asserted: performance is looked at, not tested.
"""

import sys

import torch

from tests.bench.curvature import curvature_lines
from tests.bench.export import export_lines
from tests.bench.quantization import quantization_lines
from tests.runs import execute, succeed, torchrun


def lines_of(command: list[str]) -> list[str]:
    """Lines of a comparison that takes processes of its own."""
    done = succeed(execute(command, timeout_seconds=900))
    return [line for line in done.stdout.splitlines() if " / " in line]


def main() -> None:
    """Print one line per comparison, as each is measured."""
    torch.set_num_threads(1)
    for lines in (
        curvature_lines,
        lambda: lines_of(torchrun(2, "tests.bench.training")),
        lambda: lines_of([sys.executable, "-m", "tests.bench.perturbing"]),
        lambda: lines_of([sys.executable, "-m", "tests.bench.loader"]),
        export_lines,
        quantization_lines,
    ):
        for line in lines():
            print(line, flush=True)


if __name__ == "__main__":
    main()
