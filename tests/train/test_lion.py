"""Lion in both engines against the pseudo-code of its paper (arXiv 2302.06675, algorithm 2)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.runs import make_run, on_ranks
from tests.train.plain import differentiate, plain_model
from tests.train.test_decay import BATCHES, read, train_all
from train.optimizers.lion import Lion
from train.optimizers.settings import GroupStep
from train.planning.memory import checkpoint_bytes, parameter_count, rank_memory
from train.run.config import RunConfig
from train.run.schedules import learning_rate

LION = Lion(peak_lr=1e-3, weight_decay=0.3)


class LionByHand:
    """Algorithm 2 for one tensor, in float64."""

    def __init__(self, weight: Tensor) -> None:
        self.theta, self.m = weight.double(), torch.zeros_like(weight, dtype=torch.float64)

    def step(self, g: Tensor, eta: float, lambda_: float) -> None:
        g = g.double()
        c = 0.9 * self.m + 0.1 * g
        self.theta = self.theta - eta * (torch.sign(c) + lambda_ * self.theta)
        self.m = 0.99 * self.m + 0.01 * g


def test_an_update_is_that_of_the_paper():
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(50, generator=generator), torch.randn(3, generator=generator)]
    expected = [LionByHand(weight) for weight in weights]
    momenta = [torch.zeros_like(weight) for weight in weights]
    for step in range(1, 21):
        gradients = [torch.randn(weight.shape, generator=generator) for weight in weights]
        LION.update(weights, gradients, {"exp_avg": momenta}, GroupStep(1e-3, 0.3, step))
        for by_hand, gradient in zip(expected, gradients, strict=True):
            by_hand.step(gradient, 1e-3, 0.3)
    for weight, momentum, by_hand in zip(weights, momenta, expected, strict=True):
        torch.testing.assert_close(weight.double(), by_hand.theta, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(momentum.double(), by_hand.m, rtol=1e-6, atol=1e-6)


def weights_by_hand(run: RunConfig) -> dict[str, Tensor]:
    """The weights after the batches, on one process, with gradients in float64."""
    model = plain_model(run).double()
    named = dict(model.named_parameters())
    optimizers = {name: LionByHand(weight.detach()) for name, weight in named.items()}
    for step, tokens_BS in enumerate(BATCHES, 1):
        differentiate(model, tokens_BS)
        for name, weight in named.items():
            assert weight.grad is not None
            decay = 0.0 if "embed_tokens" in name else 0.3
            optimizers[name].step(weight.grad, learning_rate(run, step), decay)
            weight.data = optimizers[name].theta
    return {name: weight.detach() for name, weight in named.items()}


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_lion_equals_a_plain_loop_at_every_layout(tmp_path, inputs, engine):
    """On one process, on two with sharded states, handed over after half of the updates.

    The two that were handed over at one layout end with the bits of the one that was not.
    """
    names = ("alone", "whole", "first", "second", "split", "last")
    runs = {
        name: make_run(
            tmp_path / name,
            **inputs,
            engine=engine,
            optimizer=LION,
            tensor=2 if engine == "megatron" and name == "split" else 1,
        )
        for name in names
    }
    alone, whole, first, second, split, last = (str(tmp_path / name) for name in names)
    out = tmp_path / "out"
    for processes, *turns in ((1, alone), (2, whole, f"{first},{second}", f"{split},{last}")):
        on_ranks(processes, train_all, out, *turns)

    expected = weights_by_hand(runs["whole"])
    start = dict(plain_model(runs["whole"]).named_parameters())
    trained = {name: read(runs[name], out / name) for name in ("alone", "whole", "second", "last")}
    for name, weights in trained.items():
        assert weights.keys() == expected.keys()
        for key, weight in weights.items():
            # Where momentum and gradient are near zero, rounding of the gradient decides the sign.
            turned = (weight.double() - expected[key]).abs() > 1e-6
            assert turned.double().mean() < 5e-3, (name, key)
            assert (weight - start[key]).abs().max() > 2e-3
    assert all(torch.equal(trained["whole"][key], trained["second"][key]) for key in expected)
    check_checkpoint(out / "first", engine)


def check_checkpoint(checkpoint: Path, engine: str) -> None:
    """The optimizer's state is the weights in fp32 and one momentum."""
    kinds = set()
    if engine == "deepspeed":
        for path in checkpoint.glob("optimizer-*.safetensors"):
            with safe_open(path, "pt") as file:
                kinds |= {key.partition("/")[0] for key in file.keys()}  # noqa: SIM118
                assert json.loads(file.metadata()["state"])["step"] == len(BATCHES) // 2
        assert kinds == {"weights", "exp_avg"}
    else:
        content = (checkpoint / ".metadata").read_bytes()
        assert b"optimizer.state.exp_avg." in content
        assert b"exp_avg_sq" not in content


def test_the_planner_counts_one_state(tmp_path, inputs):
    run = make_run(tmp_path / "run", **inputs, optimizer=LION)
    count = parameter_count(run)
    assert rank_memory(run, 2).components["optimizer states, fp32"] == 4 * count // 2
    assert checkpoint_bytes(run).full_each == (4 + 4 + 4) * count  # weights, main weights, momentum
    assert run.optimizer.describe() == "Lion, betas 0.9 and 0.99, weight decay 0.3 (adamw)"
