"""A small OLMo2 trained in this process, and the loss and its derivatives along a line by HF's
own code.

Shapes: B sequences, S positions of a sequence.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.olmo2 import modeling_olmo2

from curvature.products.exact import Quadratic
from tests.conftest import widths
from tests.curvature.conftest import TINY, _DoubleForFloat, tiny_model

LENGTH = 24


def structured_tokens(batch: int, seed: int, length: int = LENGTH) -> Tensor:
    """Sequences whose tokens have four successors each, to be learnt; int64 [batch, length + 1]."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(TINY["vocab_size"])
    columns = [torch.randint(0, vocabulary, (batch,), generator=generator)]
    for _ in range(length):
        columns.append(
            (columns[-1] * 5 + torch.randint(0, 4, (batch,), generator=generator).square())
            % vocabulary
        )
    return torch.stack(columns, dim=1)


class Line:
    """Loss at theta + v and its derivatives along v by double backward; `index` is a seed."""

    def __init__(self, model: Any, batch: int, length: int = LENGTH) -> None:
        self.model, self.batch, self.length = model, batch, length
        self.weights = dict(model.named_parameters())

    def tokens(self, index: int) -> Tensor:
        return structured_tokens(self.batch, 1000 + index, self.length)

    def _loss(self, index: int) -> Tensor:
        tokens_BS1 = self.tokens(index)
        logits_BSV = self.model(tokens_BS1[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS1[:, 1:].flatten())

    def evaluate(self, index: int, v: dict[str, Tensor]) -> Quadratic:
        weights = [self.weights[name] for name in v]
        loss = self._loss(index)
        gradient = torch.autograd.grad(loss, weights, create_graph=True)
        slope = torch.stack(
            [(g * d).sum() for g, d in zip(gradient, v.values(), strict=True)]
        ).sum()
        products = torch.autograd.grad(slope, weights)
        dots = {name: float((v[name] * hv).sum()) for name, hv in zip(v, products, strict=True)}
        return Quadratic(float(loss.detach()), float(slope.detach()), dots)

    @torch.no_grad()
    def moved(self, index: int, v: dict[str, Tensor]) -> float:
        before = {name: self.weights[name].detach().clone() for name in v}
        for name, step in v.items():
            self.weights[name].add_(step)
        loss = float(self._loss(index))
        for name, weight in before.items():
            self.weights[name].copy_(weight)
        return loss


def rounded_steps(model: Any, bits: int, group: int = 16) -> dict[str, Tensor]:
    """Rounded minus given weights of the decoder's linears, in groups on symmetric grids."""
    steps = {}
    for name, weight_OI in model.named_parameters():
        if name.endswith("proj.weight"):
            grouped = weight_OI.detach().unflatten(1, (-1, group))
            scale = grouped.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
            steps[name] = ((grouped / scale).round() * scale - grouped).flatten(1)
    return steps


class Trained(NamedTuple):
    """In float64, with all that HF hard-codes as float32 in float64 too while a test runs."""

    line: Line
    loss_before: float
    loss: float


@pytest.fixture(scope="package")
def trained():
    """An OLMo2 of 2 blocks and width 32 after 250 steps of AdamW, and what that did to its loss."""
    size = widths(32, 64, 2, 2, num_hidden_layers=2, max_position_embeddings=LENGTH)
    model = tiny_model(torch.float32, std=0.1, **size)
    line = Line(model, batch=16)
    loss_before = line.moved(0, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(250):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / 250)
        tokens_BS1 = structured_tokens(16, 10_000 + step)
        logits_BSV = model(tokens_BS1[:, :-1], use_cache=False).logits
        F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS1[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_olmo2, "torch", _DoubleForFloat())
        line = Line(model, batch=16)
        yield Trained(line, loss_before, line.moved(0, {}))
