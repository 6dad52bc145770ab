"""Passes over memory of the functions between matrix products, as compiled for a GPU."""

import json
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.runs import python, succeed

LENGTH = 4096
# Micro batch, width and heads.
SIZES = {"190M": (16, 768, 12), "1B": (4, 2048, 16), "7B": (2, 4096, 32)}


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def of_norm(sequences: int, width: int, _: int) -> tuple[Tensor, ...]:
    """Arguments of `_normed_gradients`."""
    x, by_output = (on_gpu(LENGTH, sequences, width) for _ in range(2))
    return x, on_gpu(width), on_gpu(LENGTH, sequences, 1, dtype=torch.float32), by_output


def of_queries(sequences: int, width: int, heads: int) -> tuple[Any, ...]:
    """Arguments of `_heads_gradients`: a part of a linear's output, attention's gradient of it."""
    size = width // heads
    qkv = on_gpu(LENGTH, sequences, 3 * width).unflatten(-1, (heads, 3 * size))
    by_query = on_gpu(sequences, heads, LENGTH, size).permute(2, 0, 1, 3)
    inverse = on_gpu(LENGTH, sequences, 1, dtype=torch.float32)
    turns = (on_gpu(LENGTH, 1, 1, size, dtype=torch.float32) for _ in range(2))
    return [qkv.split(size, -1)[0]], [on_gpu(width)], [inverse], [by_query], *turns


def count(*names: str) -> None:
    """Worker: prints kernels, bytes for each element, and atomic additions of each function."""
    from tests.train.compiled_functions import compiled
    from train.model.elementwise import ONE_PASS, _heads_gradients, _normed_gradients

    of_heads = partial(_heads_gradients, group=None)
    for size in map(SIZES.__getitem__, names):
        elements = LENGTH * size[0] * size[1]
        for function, arguments in ((_normed_gradients, of_norm), (of_heads, of_queries)):
            made = partial(arguments, *size)
            code = compiled(function, made, **ONE_PASS["options"])
            atomic = code.source.count("tl.atomic_add")
            print(json.dumps([code.kernels, code.num_bytes / elements, atomic]))


@pytest.mark.parametrize("names", [["190M"], pytest.param(["1B", "7B"], marks=pytest.mark.stress)])
def test_gradients_of_norms_take_one_pass(names):
    """One kernel reads x and the gradient of its norm, and writes the gradient of x, 2 bytes each.

    It was 10 bytes in a norm and 18 in heads. No sum depends on the order in which blocks end.
    """
    lines = succeed(python("tests.train.test_compiled_passes", *names)).stdout.splitlines()
    assert len(lines) == 2 * len(names)
    for kernels, num_bytes, atomic in map(json.loads, lines):
        assert kernels == 1
        assert 6 < num_bytes < 6.2  # fp32 numbers for each token and feature beside them
        assert atomic == 0


if __name__ == "__main__":
    count(*sys.argv[1:])
