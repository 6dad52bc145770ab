"""Optimizers and rules of decay in both engines against plain loops, one tensor at a time."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from tests.ckpt_tools.checkpoints import read_snapshot
from tests.runs import draw_weights, leave_layout, make_run, on_ranks, save
from tests.train.plain import differentiate, plain_model
from tests.train.test_soap import SoapByHand
from train.data.batches import Batch
from train.distributed import start
from train.engines import build_engine
from train.optimizers.adamw import AdamW
from train.optimizers.lion import Lion
from train.optimizers.muon import Muon, orthogonalized
from train.optimizers.soap import Soap
from train.planning.memory import checkpoint_bytes, parameter_count, rank_memory
from train.run.config import RunConfig, load_run
from train.run.schedules import learning_rate

DRAWN = torch.Generator().manual_seed(5)
BATCHES = [torch.randint(0, 320, (8, 33), generator=DRAWN) for _ in range(6)]
PEAK = 1e-2
LION = Lion(peak_lr=1e-3, weight_decay=0.3)
# Rules of decay with a strength that shows.
OPTIMIZERS: dict[str, Any] = {
    "adamc": AdamW(peak_lr=PEAK, decay="adamc", weight_decay=2.0),
    "independent": AdamW(peak_lr=PEAK, decay="independent", weight_decay=0.02),
    "muon": Muon(peak_lr=PEAK),
    "lion": LION,
    # Without bases. With them the first update is the sign of every entry of a rotated gradient,
    # and rounding to fp32 flips one of 512. With bases: test_matrices.py, test_soap.py.
    "soap": Soap(peak_lr=PEAK, beta1=0.9, max_width=8),
}


def train_all(out: str, *pairs: str) -> None:
    """Worker, on every rank: train pairs of runs, the first of which hands over by a checkpoint.

    Each makes one update for each of its half of the batches, and saves by its name.
    """
    device, half = start(), len(BATCHES) // 2
    for pair in pairs:
        first, second = (Path(run_dir) for run_dir in pair.split(","))
        for run_dir, steps in (
            (first, range(1, half + 1)),
            (second, range(half + 1, 2 * half + 1)),
        ):
            run = load_run(run_dir / "run.json")
            engine = build_engine(run, device)
            if run_dir == first:
                draw_weights(engine, run)
            else:
                engine.load(Path(out) / first.name)
            for step in steps:
                batch = Batch.of(BATCHES[step - 1]).of_replica(engine.replica)
                engine.train_step(batch, learning_rate(run, step), lambda _: True)
            save(engine, Path(out) / run_dir.name, weights_only=run_dir == second)
            leave_layout(run)
    engine.close()


class AdamWByHand:
    """AdamW with a rule of decay for one tensor."""

    def __init__(self, name: str, rule: str, strength: float) -> None:
        self.name, self.rule, self.strength = name, rule, strength
        self.first: Any = 0.0
        self.second: Any = 0.0

    def step(self, weight: Tensor, gradient: Tensor, rate: float, step: int) -> Tensor:
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.95 * self.second + 0.05 * gradient**2
        update = self.first / (1 - 0.9**step)
        update /= (self.second / (1 - 0.95**step)).sqrt() + 1e-8
        return weight * (1 - self.decay(rate)) - rate * update

    def decay(self, rate: float) -> float:
        """The share of a weight that one step takes away."""
        if "embed_tokens" in self.name:
            return 0.0
        if self.rule == "independent":
            return self.strength * rate / PEAK
        squared = self.rule == "adamc" and "_proj" in self.name
        return self.strength * rate * (rate / PEAK if squared else 1.0)


class MuonByHand:
    """Muon for one matrix, by its singular values."""

    momentum: Any = 0.0

    def step(self, weight: Tensor, gradient: Tensor, rate: float, _step: int) -> Tensor:
        self.momentum = 0.95 * self.momentum + 0.05 * gradient
        direction = direction_by_hand(0.95 * self.momentum + 0.05 * gradient)
        return weight * (1 - rate * 0.1) - rate * direction


class SoapMatrixByHand:
    """SOAP without bases for one matrix: Adam from the second gradient on, with decay."""

    def __init__(self) -> None:
        self.layer = SoapByHand(max_width=8, f=10, beta1=0.9)

    def step(self, weight: Tensor, gradient: Tensor, rate: float, _step: int) -> Tensor:
        update = torch.from_numpy(self.layer.step(gradient.numpy()))
        return weight * (1 - rate * 0.1) - rate * update


def direction_by_hand(matrix: Tensor) -> Tensor:
    """Five times the quintic polynomial of every singular value, which keeps the vectors; scaled
    so that an orthogonal matrix of these sides has elements of 0.2 on the whole.
    """
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vt * 0.2 * math.sqrt(max(matrix.shape))


class LionByHand:
    """Algorithm 2 of Lion's paper (arXiv 2302.06675) for one tensor."""

    def __init__(self, name: str) -> None:
        self.lambda_ = 0.0 if "embed_tokens" in name else 0.3
        self.m: Any = 0.0

    def step(self, theta: Tensor, g: Tensor, eta: float, _step: int) -> Tensor:
        c = 0.9 * self.m + 0.1 * g
        self.m = 0.99 * self.m + 0.01 * g
        return theta - eta * (torch.sign(c) + self.lambda_ * theta)


def by_hand(optimizer: str, name: str) -> Any:
    """The optimizer of one tensor."""
    if optimizer == "lion":
        return LionByHand(name)
    if optimizer == "muon":
        return MuonByHand() if "_proj" in name else AdamWByHand(name, "adamw", 0.1)
    if optimizer == "soap":
        return SoapMatrixByHand() if "_proj" in name else AdamWByHand(name, "adamw", 0.1)
    settings = OPTIMIZERS[optimizer]
    return AdamWByHand(name, settings.decay, settings.weight_decay)


def weights_by_hand(run: RunConfig, optimizer: str) -> dict[str, Tensor]:
    """The weights after the batches, on one process in float64."""
    model = plain_model(run).double()
    named = dict(model.named_parameters())
    optimizers = {name: by_hand(optimizer, name) for name in named}
    for step, tokens_BS in enumerate(BATCHES, 1):
        differentiate(model, tokens_BS)
        rate = learning_rate(run, step)
        for name, weight in named.items():
            weight.data = optimizers[name].step(weight.data, weight.grad, rate, step)
    return {name: weight.detach() for name, weight in named.items()}


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_optimizers_equal_a_plain_loop_at_every_layout(tmp_path, inputs, engine):
    """Warm-up over 4 steps, then a falling cosine: the rate differs from its peak at most steps.

    After three updates megatron hands over from two tensor ranks to two replicas. Muon's momentum
    is orthogonalised as whole matrices of HF: grouped keys and values, gate and up.
    """
    out, runs, pairs = tmp_path / "out", {}, []
    for name, optimizer in OPTIMIZERS.items():
        # On two data-parallel ranks, half of three layers ends inside a matrix.
        settings = {"layers": 3, "kv_heads": 2, "optimizer": optimizer, "engine": engine}
        first, second = tmp_path / f"{name}-1", tmp_path / f"{name}-2"
        make_run(first, **inputs, **settings, tensor=2 if engine == "megatron" else 1)
        runs[name] = make_run(second, **inputs, **settings)
        pairs.append(f"{first},{second}")
    on_ranks(2, train_all, out, *pairs)

    for name, run in runs.items():
        expected = weights_by_hand(run, name)
        initial = dict(plain_model(run).named_parameters())
        weights = read_snapshot(out / f"{name}-2", run)
        assert weights.keys() == expected.keys()
        for key, weight in weights.items():
            moved, error = expected[key] - initial[key], weight - expected[key]
            if name == "lion":
                # Where momentum and gradient are near zero, rounding of the gradient decides the sign.
                assert (error.abs() > 1e-6).double().mean() < 5e-3, (name, key)
                assert moved.abs().max() > 2e-3
            else:
                # A gradient near zero moves a weight by the sign of its rounding at first.
                assert error.norm() < 2e-3 * moved.norm(), (name, key)
    check_checkpoint_of_lion(out / "lion-1", engine)


def check_checkpoint_of_lion(checkpoint: Path, engine: str) -> None:
    """The optimizer's state is the weights in fp32 and one momentum."""
    if engine == "megatron":
        content = (checkpoint / ".metadata").read_bytes()
        assert b"optimizer.state.exp_avg." in content
        assert b"exp_avg_sq" not in content
        return
    kinds = set()
    for path in checkpoint.glob("optimizer-*.safetensors"):
        with safe_open(path, "pt") as file:
            kinds |= {key.partition("/")[0] for key in file.keys()}  # noqa: SIM118
            assert json.loads(file.metadata()["state"])["step"] == len(BATCHES) // 2
    assert kinds == {"weights", "exp_avg"}


@pytest.mark.parametrize("shape", [(32, 32), (64, 32), (16, 48)])
def test_newton_schulz_is_a_polynomial_of_the_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = direction_by_hand(matrix)
    direction = orthogonalized(matrix, torch.float32)
    assert (direction - expected).norm() < 1e-5 * expected.norm()
    assert direction.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)
    # As torch computes it, in bf16.
    torchs = _zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()
    in_bf16 = orthogonalized(matrix, torch.bfloat16)
    assert (in_bf16 - torchs * 0.2 * math.sqrt(max(shape))).norm() < 1e-6 * in_bf16.norm()


def test_the_planner_counts_the_one_state_of_lion(tmp_path, inputs):
    run = make_run(tmp_path / "run", **inputs, optimizer=LION)
    count = parameter_count(run)
    assert rank_memory(run, 2).components["optimizer states, fp32"] == 4 * count // 2
    assert checkpoint_bytes(run).full_each == (4 + 4 + 4) * count  # weights, main weights, momentum
    assert run.optimizer.describe() == "Lion, betas 0.9 and 0.99, weight decay 0.3 (adamw)"
