"""A population of microbatches with known Hessians, in which many repetitions of an estimate
cost no model pass.

Shapes: B sequences, S positions, P parameters, T tensors, D microbatches of the population, R
    repetitions,
M microbatches of an estimate, K probes of a microbatch.
"""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.products.exact import Quadratic
from curvature.products.probes import rademacher
from tests.conftest import widths
from tests.curvature.conftest import dense_hessian, tiny_model

VOCABULARY = 12


def sequences(
    batch: int, successors: int, generator: torch.Generator, *, length: int = 8
) -> Tensor:
    """Tokens each of which has so many likely successors, int64 [batch, length + 1]."""
    tokens_BS1 = torch.randint(0, VOCABULARY, (batch, length + 1), generator=generator)
    for place in range(length):
        step = torch.randint(0, successors, (batch,), generator=generator)
        tokens_BS1[:, place + 1] = (tokens_BS1[:, place] * 5 + step) % VOCABULARY
    return tokens_BS1


def trained_model(steps: int = 150):
    """An OLMo2 of 228 parameters in float64, trained a little on text of two successors."""
    shape = widths(4, 4, 1, 1, num_hidden_layers=1, vocab_size=VOCABULARY)
    model = tiny_model(std=0.3, rms_norm_eps=1e-2, **shape)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(steps):
        tokens_BS1 = sequences(8, 2, generator)
        logits_BSV = model(tokens_BS1[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS1[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


class Population(NamedTuple):
    """Hessians of D microbatches of two kinds of text, each as likely as the other to be drawn."""

    names: list[str]
    hessians_DPP: Tensor
    members_PT: Tensor  # 1 where a parameter belongs to a tensor

    def traces(self) -> dict[str, float]:
        """The exact trace of every tensor's block in the mean Hessian of all microbatches."""
        traces_T = self.hessians_DPP.mean(dim=0).diagonal() @ self.members_PT
        return dict(zip(self.names, traces_T.tolist(), strict=True))

    def dots(self, microbatch: int, count: int, *, seed: int) -> Tensor:
        """v_t'(Hv)_t for `count` of the project's own probes, [count, T]."""
        size = len(self.members_PT)
        v_nP = (
            rademacher("probe", 0, count * size, seed=seed, probe=microbatch)
            .view(count, size)
            .double()
        )
        return (v_nP * (v_nP @ self.hessians_DPP[microbatch])) @ self.members_PT

    def draw(self, repetitions: int, microbatches: int, probes: int, *, seed: int) -> Tensor:
        """Independent microbatches, each with its own probes: dots [R, M, K, T]."""
        generator = torch.Generator().manual_seed(seed)
        which_RM = torch.randint(
            len(self.hessians_DPP), (repetitions, microbatches), generator=generator
        )
        dots_RMKT = torch.empty(
            repetitions, microbatches, probes, len(self.names), dtype=torch.float64
        )
        for microbatch in range(len(self.hessians_DPP)):
            chosen = which_RM == microbatch
            count = int(chosen.sum())
            dots_RMKT[chosen] = self.dots(microbatch, count * probes, seed=seed).view(
                count, probes, len(self.names)
            )
        return dots_RMKT

    def quadratics(self, dots_nT: Tensor) -> list[Quadratic]:
        """Result of an evaluation of these pairs."""
        return [
            Quadratic(1.0, 0.0, dict(zip(self.names, row, strict=True))) for row in dots_nT.tolist()
        ]


@pytest.fixture(scope="session")
def population() -> Population:
    """24 microbatches: half of the text that was trained on, half with four successors."""
    model, generator = trained_model(), torch.Generator().manual_seed(1)
    microbatches = [sequences(4, 2 if index % 2 else 4, generator) for index in range(24)]
    hessians_DPP = torch.stack([dense_hessian(model, tokens).hessian_PP for tokens in microbatches])
    weights = list(model.named_parameters())
    owners = torch.cat(
        [torch.full((weight.numel(),), index) for index, (_, weight) in enumerate(weights)]
    )
    return Population([name for name, _ in weights], hessians_DPP, F.one_hot(owners).double())
