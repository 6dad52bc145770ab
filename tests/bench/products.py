"""`python -m tests.bench.products`: what a Hessian-vector product moves at the 7B and 1B shapes.

One sequence of 4,096 tokens in bf16, every operation counted on tensors without content: as it runs
line by line, with each function of `curvature.fused` as one kernel that moves its arguments and
results (what `--dry-run` assumes), and with what inductor's own count says of its fused loops, made
for a CPU at a small shape. Products of matrices are counted apart, as FLOPs. Commit b95962f, whose
duals autograd differentiated line by line, moved 6.7 TB in 48,200 kernels with checkpointing at 7B.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from transformers import Olmo2Config

from curvature.cost import simulation
from curvature.cost.simulation import Count, Pass, simulate
from curvature.settings import HutchinsonSettings

LENGTH, LONGEST = 4096, 64  # tokens; an axis of what is compiled
SHAPES: dict[str, dict[str, Any]] = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
}
_ratios: dict[tuple[str, int], tuple[int, float]] = {}


class LineByLine(Count):
    """Counts what is inside the functions too."""

    def one_pass(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """As a CPU runs it."""
        return function(*arguments)


class Compiled(Count):
    """Counts a function's loops, and their bytes in units of its arguments and results."""

    def one_pass(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """As inductor fuses it."""
        before = self.moved
        result = super().one_pass(function, arguments)
        loops, ratio = inductor(function, arguments)
        self.kernels += loops - 1
        self.moved = int(before + ratio * (self.moved - before))
        return result


def inductor(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[int, float]:
    """Loops that inductor makes of a function, and their bytes over those of one pass."""
    from torch._inductor import compile_fx, config, metrics

    key = function.__name__, len([x for x in tree_leaves(arguments) if isinstance(x, Tensor)])
    if key not in _ratios:
        compile_fx.inductor_metrics_log.setLevel(logging.INFO)  # else it counts nothing
        metrics.reset()

        def small(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return torch.ones([min(size, LONGEST) for size in x.shape], dtype=x.dtype)

        with _disable_current_modes(), config.patch(fx_graph_cache=False):
            inputs = tree_map(small, arguments)
            size = sum(x.nbytes for x in tree_leaves(inputs) if isinstance(x, Tensor))
            outputs = torch.compile(function)(*inputs)
        size += sum(x.nbytes for x in tree_leaves(outputs))
        _ratios[key] = len(metrics.nodes_num_elem), metrics.num_bytes_accessed / size
    return _ratios[key]


def counted(kind: type[Count], shape: str, *, checkpointing: bool) -> tuple[Pass, int]:
    """A product, and its kernels."""
    heads = SHAPES[shape]["hidden_size"] // 128
    config = Olmo2Config(
        vocab_size=100352,
        num_attention_heads=heads,
        max_position_embeddings=LENGTH,
        **SHAPES[shape],
    )
    settings = HutchinsonSettings(
        dtype="bf16", checkpointing=checkpointing, microbatch_sequences=1, lambda_max=False
    )
    counts: list[Count] = []

    def make(known: set[int]) -> Count:
        counts.append(kind(known))
        return counts[-1]

    with mock.patch.object(simulation, "Count", make):
        product = simulate(config, settings, LENGTH, dual=True)
    shallow, deep = (count.kernels for count in counts)
    return product, shallow + (config.num_hidden_layers - 1) * (deep - shallow)


def main() -> None:
    """Print bytes, kernels and FLOPs."""
    ways = (("line by line", LineByLine), ("one pass each", Count), ("inductor's loops", Compiled))
    for shape in SHAPES:
        for checkpointing in (True, False):
            for title, kind in ways:
                product, kernels = counted(kind, shape, checkpointing=checkpointing)
                what = f"{shape}{', checkpointing' if checkpointing else '':<15} {title}"
                sys.stdout.write(
                    f"{what:<38} {product.moved / 1e12:>6.2f} TB {kernels:>7} kernels"
                    f" {product.flops / 1e12:>5.0f} TFLOP\n"
                )
                sys.stdout.flush()


if __name__ == "__main__":
    main()
