"""All measurements on vectors that are split unevenly over ranks, without the imports of a model.

Shapes: P parameters, p those of this rank, k vectors.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from curvature.spectrum.density import density
from curvature.spectrum.lanczos import lanczos
from tests.curvature.spectrum.operators import designed, signs

SIZE = 150
BOUNDARIES = (0, 23, 23, SIZE)  # of three ranks: the second holds nothing


def measure(mine: slice, summed: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Everything, from entries `mine` of the vectors; `summed` adds up over ranks."""
    known = designed(
        [40.0, 9.0, 4.0, *[((i - 60) / 100) ** 3 for i in range(SIZE - 5)], -1.5, -0.9]
    )

    def product(v_p: Tensor) -> Tensor:
        v_P = torch.zeros(SIZE, dtype=v_p.dtype)
        v_P[mine] = v_p
        return known.matrix_PP[mine] @ summed(v_P)

    def inner(vectors: Sequence[Tensor], b_p: Tensor) -> Tensor:
        return summed(torch.stack(list(vectors)).double() @ b_p.double())

    start_p = signs(SIZE)[mine]
    ends = lanczos(
        product, start_p, inner, largest=5, smallest=3, tolerance=1e-6, max_iterations=120
    )
    starts = (signs(SIZE, seed)[mine] for seed in range(4))
    spread = density(product, starts, inner, num_parameters=SIZE, steps=20)
    return {
        "values": [pair.value for pair in ends.largest + ends.smallest],
        "residuals": [pair.residual for pair in ends.largest + ends.smallest],
        "counts": [ends.iterations, *map(len, spread.nodes)],
        "moments": [*spread.trace, *spread.squared_norm],
        "nodes": spread.nodes[0],
    }


def write_figures(out: str) -> None:
    """Worker, on every rank: writes what it found to OUT/rank.json."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def summed(part: Tensor) -> Tensor:
        dist.all_reduce(part)
        return part

    figures = measure(slice(BOUNDARIES[rank], BOUNDARIES[rank + 1]), summed)
    (Path(out) / f"{rank}.json").write_text(json.dumps(figures))
    dist.destroy_process_group()
