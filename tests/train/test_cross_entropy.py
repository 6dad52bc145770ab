"""The Triton kernel of the loss against fp64, in Triton's interpreter on a CPU.

It runs where Triton is: with a torch for CUDA, on any machine. `tests.gpu` compares and times it on
a GPU.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.runs import execute, succeed
from train.model.elementwise import Group

TOKENS, WIDTH, ROWS, CHUNK, Z_LOSS = 10, 16, 700, 4, 1e-2
BLOCK = 128  # so that a row has several, and a part of one
# Of the largest: fp32 sums of 700 terms; bf16, whose last bits the interpreter cuts off where a
# GPU rounds them.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels, and which of these count.

    The first token's label has nearly all of the probability: its share less 1 is close to 0.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(ROWS, WIDTH, generator=generator) * 0.5
    labels = torch.randint(0, ROWS, (TOKENS,), generator=generator)
    labels[0], labels[1], labels[2] = 0, ROWS - 1, ROWS // 2  # ends of the ranks' rows
    weight[0] = 2 * hidden[0]
    counted = torch.ones(TOKENS, dtype=torch.bool)
    counted[3] = counted[9] = False
    return hidden.to(dtype), weight.to(dtype), labels, counted


def exact(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of both losses, and the gradients by hidden states and weight, in fp64."""
    hidden, weight, labels, counted = inputs(dtype)
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    logits = (hidden @ weight.t()).to(dtype).double()  # as they are in memory
    logits = logits.detach() + (hidden @ weight.t()) - (hidden @ weight.t()).detach()
    log_z = logits.logsumexp(-1)
    cross_entropy = log_z - logits.gather(-1, labels[:, None]).squeeze(-1)
    sums = torch.stack([cross_entropy[counted].sum(), Z_LOSS * log_z[counted].square().sum()])
    (sums.sum() / TOKENS).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return sums.detach(), hidden.grad, weight.grad


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected).abs().max() / expected.abs().max())


def compare(rank: int, store: str) -> None:
    """Compare the head's losses by the kernel, alone and with half of the rows on each rank."""
    from triton.runtime.interpreter import InterpretedFunction

    from train.model import cross_entropy, losses

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    assert isinstance(cross_entropy._rows, InterpretedFunction)
    patches: dict[str, Any] = {"_line_by_line": losses._fused, "CPU_CHUNK_TOKENS": CHUNK}
    with mock.patch.multiple(losses, **patches), mock.patch.object(cross_entropy, "BLOCK", BLOCK):
        for dtype, bound in BOUNDS.items():
            compare_in(dtype, bound, None, slice(ROWS))
            half = ROWS // 2
            compare_in(dtype, bound, dist.group.WORLD, slice(rank * half, (rank + 1) * half))
    dist.destroy_process_group()


def compare_in(dtype: torch.dtype, bound: float, group: Group, rows: slice) -> None:
    """Compare losses and gradients of these rows of the vocabulary."""
    from train.model.losses import Targets, head_losses

    sums, by_hidden, by_weight = exact(dtype)
    hidden, weight, labels, counted = inputs(dtype)
    hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight[rows]))
    targets = Targets(labels, counted, Z_LOSS)
    loss, found = head_losses(hidden, weight, targets, group)
    loss.backward()
    with torch.no_grad():
        _, evaluated = head_losses(hidden, weight, targets, group)

    assert hidden.grad is not None
    assert weight.grad is not None
    if group is not None:  # as the layer before the head does
        dist.all_reduce(hidden.grad)
    assert torch.equal(evaluated, found)
    assert relative(found, sums) < BOUNDS[torch.float32]
    assert relative(loss.detach(), sums.sum() / TOKENS) < BOUNDS[torch.float32]
    assert relative(hidden.grad, by_hidden) < bound
    assert relative(weight.grad, by_weight[rows]) < bound
    # A token that does not count has no gradient, and that of a likely label keeps its digits.
    assert not hidden.grad[~counted].any()
    assert relative(hidden.grad[0], by_hidden[0]) < bound


def on_two_ranks(store: str) -> None:
    """Worker: compares here and in a fork, before Triton is imported and reads its environment."""
    if (fork := os.fork()) == 0:
        compare(1, store)
        os._exit(0)
    compare(0, store)
    assert os.waitpid(fork, 0)[1] == 0


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with a torch for CUDA")
def test_the_kernel_against_fp64_alone_and_over_two_ranks(tmp_path: Path) -> None:
    """By a process of its own: Triton interprets what was imported after it was told to."""
    words = on_two_ranks.__module__, on_two_ranks.__name__, str(tmp_path / "store")
    command = [sys.executable, "-m", "tests.worker", *words]
    succeed(execute(command, variables={"TRITON_INTERPRET": "1"}))
