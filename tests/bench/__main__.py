"""make bench: what our code costs against a peer on the same model, batch and machine, in one run.

Figures are medians of ratios of neighbouring runs (A B A B ...), so they hold on a machine whose
speed drifts. One thread. Nothing here is asserted: performance is looked at, not tested.
"""

import torch

from tests.bench.average import average_lines
from tests.bench.curvature import curvature_lines
from tests.bench.export import export_lines
from tests.bench.loader import loader_lines
from tests.bench.quantization import quantization_lines
from tests.bench.tracking import tracking_lines
from tests.runs import execute, torchrun


def training_lines() -> list[str]:
    """Both engines against plain transformers, in two processes of their own."""
    done = execute(torchrun(2, "tests.bench.training"), timeout_seconds=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def main() -> None:
    """Print one line per comparison, as each is measured."""
    torch.set_num_threads(1)
    for lines in (
        curvature_lines,
        training_lines,
        loader_lines,
        export_lines,
        average_lines,
        quantization_lines,
        tracking_lines,
    ):
        for line in lines():
            print(line, flush=True)


if __name__ == "__main__":
    main()
