"""Muon in both engines against singular values, one matrix at a time; its checkpoints too."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from tests.runs import make_run, on_ranks
from tests.train.plain import adamw, differentiate, plain_model, update
from tests.train.test_decay import BATCHES, read, train_all
from train.optimizers.muon import Muon, orthogonalized
from train.run.config import RunConfig
from train.run.schedules import learning_rate


def direction_by_hand(matrix: Tensor) -> Tensor:
    """Five times the quintic polynomial of every singular value, which keeps the vectors."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vt


@pytest.mark.parametrize("shape", [(32, 32), (64, 32), (16, 48)])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = direction_by_hand(matrix) * 0.2 * math.sqrt(max(shape))
    direction = orthogonalized(matrix, torch.float32)
    assert (direction - expected).norm() < 1e-5 * expected.norm()
    # An orthogonal matrix of these sides, so scaled, has elements of 0.2 on the whole.
    assert direction.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)
    # As torch computes it, in bf16.
    torchs = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
    in_bf16 = orthogonalized(matrix, torch.bfloat16)
    assert (in_bf16 - torchs * 0.2 * math.sqrt(max(shape))).norm() < 1e-6 * in_bf16.norm()


def weights_by_hand(run: RunConfig) -> dict[str, Tensor]:
    """The weights after the batches: Muon for `_proj` matrices, torch's AdamW for the rest."""
    model = plain_model(run)
    named = dict(model.named_parameters())
    matrices = {name: weight for name, weight in named.items() if "_proj" in name}
    rest = {name: weight for name, weight in named.items() if name not in matrices}
    optimizer = adamw(rest)
    momentum = {name: torch.zeros_like(weight) for name, weight in matrices.items()}
    for step, tokens_BS in enumerate(BATCHES, 1):
        differentiate(model, tokens_BS)
        rate = learning_rate(run, step)
        for name, weight in matrices.items():
            assert weight.grad is not None
            momentum[name] = 0.95 * momentum[name] + 0.05 * weight.grad
            direction = direction_by_hand(0.95 * momentum[name] + 0.05 * weight.grad)
            direction *= 0.2 * math.sqrt(max(weight.shape))
            weight.data = weight.data * (1 - rate * 0.1) - rate * direction.float()
        update(optimizer, rate)
    return {name: weight.detach() for name, weight in named.items()}


def test_muon_equals_a_plain_loop_at_every_layout(tmp_path, inputs):
    """Each engine hands over after three updates: megatron from two tensor ranks to two replicas.

    Momentum is orthogonalised as whole matrices of HF: grouped keys and values, gate and up.
    """
    # On two data-parallel ranks, half of three layers ends inside a matrix.
    muon: dict[str, Any] = {"layers": 3, "kv_heads": 2, "optimizer": Muon(peak_lr=1e-2)}
    out, last = tmp_path / "out", {}
    for engine in ("megatron", "deepspeed"):
        first, second = tmp_path / f"{engine}-1", tmp_path / f"{engine}-2"
        tensor = 2 if engine == "megatron" else 1
        make_run(first, **inputs, **muon, engine=engine, tensor=tensor)
        last[second.name] = make_run(second, **inputs, **muon, engine=engine)
        on_ranks(2, train_all, out, f"{first},{second}")
    expected = weights_by_hand(last["megatron-2"])
    start = dict(plain_model(last["megatron-2"]).named_parameters())
    for name, run in last.items():
        weights = read(run, out / name)
        assert weights.keys() == expected.keys()
        for key, weight in weights.items():
            # A gradient near zero moves a weight of AdamW by the sign of its rounding at first.
            moved = (expected[key] - start[key]).norm()
            assert (weight - expected[key]).norm() < 2e-3 * moved, (name, key)
