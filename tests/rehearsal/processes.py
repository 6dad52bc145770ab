"""Parts of a rehearsal that run in a process of their own.

`python -m tests.rehearsal.processes cpu|gpu RUN_DIR [PLACE]` trains, on the CPU or on the stand-in;
a PLACE leaves its tensors on the CPU. Either attends by products of matrices, as in
`tests.rehearsal.conftest`. `eight-bits RUN_DIR` trains on the CPU with 8-bit products written in
torch.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.forked import Forked
from tests.rehearsal.stand_in import PROJECT, gpu, without_attention_kernels, without_nccl
from tests.runs import start_ranks
from train.run.config import load_run
from train.run.directory import RunDirectory
from train.run.launch import Launch


def forked(
    ranks: int, *words: str, tree: Path = PROJECT, variables: dict[str, str] | None = None
) -> Forked:
    """Start what `tests.gpu.launch.start` starts, forked."""
    assert tree == PROJECT
    return start_ranks(ranks, *words, variables=variables)


def forked_on_stand_ins(
    ranks: int, *words: str, tree: Path = PROJECT, variables: dict[str, str] | None = None
) -> Forked:
    """Start what `tests.gpu.launch.start` starts, forked, each rank on a stand-in for its GPU."""
    # As in a job with --gpus-per-task=1: every rank sees one GPU.
    variables = (variables or {}) | {"SLURM_LOCALID": "0"}
    return forked(ranks, "tests.rehearsal.on_stand_in", *words, tree=tree, variables=variables)


def run_one(measure: Callable[[Any], list[Any]], work: Path, out: Path) -> None:
    """Writes the figures of a check of tests/gpu whose device is `cuda`."""
    from tests.gpu.workbench import IN_SMALL, Workbench

    workbench = Workbench("cuda", IN_SMALL, work)
    with without_nccl(), gpu(), without_attention_kernels():
        figures = measure(workbench)
    out.write_text(json.dumps([figure.described() for figure in figures]))


def train(path: Path) -> None:
    """The loop, imported where it is known whether there is a GPU."""
    from train.loop import train as loop

    loop(path, load_run(RunDirectory(path).run_json), Launch())


def train_on_stand_in(path: Path, left: str | None = None) -> None:
    """Every tensor goes to the GPU."""
    timed = mock.patch("train.monitoring.product_seconds", return_value=1.0)
    with without_nccl(), timed, gpu(left) as stand_in, without_attention_kernels():
        train(path)
    assert stand_in.places
    assert not stand_in.on_cpu, stand_in.on_cpu


def train_in_eight_bits(path: Path) -> None:
    """Transformer Engine's classes of a layer are replaced by `eight_bit_kernels`."""
    precision = load_run(RunDirectory(path).run_json).precision
    replaced: dict[str, Any] = {
        "check_can_run": lambda _: None,
        "kernels": lambda: eight_bit_kernels(precision),
    }
    with mock.patch.multiple("train.megatron.transformer_engine", **replaced):
        train(path)


def eight_bit_kernels(precision: str) -> dict[str, Any]:
    """The classes of a layer on one rank, mcore's but for the products."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from tests.gpu.transformer_engine import EightBitLinear
    from train.megatron.layers import CausalAttention

    def eight_bits(linear: Any) -> Any:
        class Linear(linear):
            def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
                if self.config.fp8 is None:  # in bf16, as probes are
                    return super().forward(x, *args, **kwargs)
                output = EightBitLinear.apply(x.flatten(0, 1), self.weight, precision)
                return output.unflatten(0, x.shape[:2]), None

        return Linear

    return {
        "column": eight_bits(ColumnParallelLinear),
        "row": eight_bits(RowParallelLinear),
        "attention": CausalAttention,
    }


if __name__ == "__main__":
    kind, run_directory, *place = sys.argv[1:]
    if kind == "eight-bits":
        train_in_eight_bits(Path(run_directory))
    else:
        with sdpa_kernel(SDPBackend.MATH):
            {"cpu": train, "gpu": train_on_stand_in}[kind](Path(run_directory), *place)
