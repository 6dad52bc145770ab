"""`python -m tests.bench.step`: kernels, bytes and MFU of a step by the roofline, for five sizes."""

from math import inf
from typing import Any

from study.recipes.resolve import resolve
from train.planning.flops import GPUS
from train.planning.speed import EXPECTED, FAST, SLOW, Rates, Roofline
from train.run.config import RunConfig

FREE = Rates(inf, (inf, inf), 1, inf, 0, 0, inf, 0, inf, 1, 0, 0)  # nothing takes time
# Recipes, and the H100s of a run.
SIZES = {
    "70M": ("pythia-70m-kumar", 1),
    "160M": ("pythia-160m-lr", 1),
    "190M": ("olmo2-190m-lr", 1),
    "1B": ("olmo2-1b-lr", 8),
    "7B": ("olmo2-7b-lr", 64),
}


def kernels_of(run: RunConfig, gpus: int) -> float:
    """Return the kernels that a GPU starts in a step: a second each."""
    return Roofline(run, gpus, 8, GPUS["h100"], FREE._replace(start=1)).seconds


def bytes_of(run: RunConfig, gpus: int) -> float:
    """Return the bytes that a GPU moves in a step beside products: a byte a second."""
    slow = GPUS["h100"]._replace(bandwidth=1)
    return Roofline(run, gpus, 8, slow, FREE._replace(bandwidth=1, sums=1)).seconds


def row(name: str, **changes: Any) -> str:
    """Return a line of the table."""
    recipe, gpus = SIZES[name]
    run = resolve(recipe, "full").trained[0].model_copy(update=changes)
    mfu = [Roofline(run, gpus, 8, GPUS["h100"], rates).mfu for rates in (EXPECTED, SLOW, FAST)]
    return (
        f"| {name} | {gpus} | {run.micro_batch_size} | {kernels_of(run, gpus):,.0f} |"
        f" {bytes_of(run, gpus) / 1e9:,.0f} GB | {mfu[0]:.1%} | {mfu[1]:.0%} to {mfu[2]:.0%} |"
    )


def main() -> None:
    """Print the table."""
    print(
        "| model | H100 | micro batch | kernels | bytes | MFU | range |\n|---|---|---|---|---|---|---|"
    )
    for name in SIZES:
        print(row(name))


if __name__ == "__main__":
    main()
