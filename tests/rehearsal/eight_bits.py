"""`-m tests.rehearsal.eight_bits RUN_DIR`: trains with 8-bit products written in torch."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from tests.gpu.transformer_engine import EightBitLinear
from train.run.config import load_run
from train.run.directory import RunDirectory
from train.run.launch import Launch


def kernels(precision: str) -> dict[str, Any]:
    """The classes of a layer on one rank, mcore's but for the products."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from train.megatron.layers import CausalAttention, post_normed

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
        "row": post_normed(eight_bits(RowParallelLinear)),
        "attention": CausalAttention,
    }


def train(path: Path) -> None:
    """The loop on a CPU."""
    run = load_run(RunDirectory(path).run_json)
    from train.loop import train as loop

    replaced: dict[str, Any] = {
        "check_can_run": lambda _: None,
        "kernels": lambda: kernels(run.precision),
    }
    with mock.patch.multiple("train.megatron.transformer_engine", **replaced):
        loop(path, run, Launch())


if __name__ == "__main__":
    train(Path(sys.argv[1]))
