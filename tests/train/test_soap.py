"""SOAP against the algorithm of its paper, its states at every layout, and its bytes in the plan.

Shapes: O outputs, I inputs.
"""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode

from tests.ckpt_tools.checkpoints import read_shards
from tests.runs import draw_weights, leave_layout, make_run, on_ranks, save
from train.data.batches import Batch
from train.distributed import gathered, start
from train.engines import build_engine
from train.model.config import parameter_shapes
from train.optimizers import matrices
from train.optimizers.settings import GroupStep
from train.optimizers.soap import Soap
from train.planning.memory import checkpoint_bytes, rank_memory
from train.run.config import RunConfig, load_run
from train.run.schedules import learning_rate

DRAWN = torch.Generator().manual_seed(5)
BATCHES = [torch.randint(0, 320, (8, 33), generator=DRAWN) for _ in range(6)]
SOAP = Soap(peak_lr=1e-2, refresh_updates=2)


class SoapByHand:
    """Algorithm 3 of arXiv 2409.11321 for one layer, in numpy, with the names that it has there.

    As its section 4 says, Q_L and Q_R of a side that is too wide are the identity, and the first
    gradient gives L and R alone. The bias of both moments is corrected as Adam does.
    """

    def __init__(self, max_width: int, f: int, beta1: float = 0.95) -> None:
        self.max_width, self.f, self.beta1, self.t = max_width, f, beta1, 0
        self.M: Any = 0.0
        self.V: Any = 0.0

    def step(self, G: np.ndarray) -> np.ndarray:
        beta1, beta2, eps = self.beta1, 0.95, 1e-8
        if self.t == 0:
            self.L, self.R = 0.05 * G @ G.T, 0.05 * G.T @ G
            self.Q_L, self.Q_R = self.eigenvectors(self.L), self.eigenvectors(self.R)
            self.t = 1
            return np.zeros_like(G)
        self.M = beta1 * self.M + (1 - beta1) * G
        rotated = self.Q_L.T @ G @ self.Q_R
        self.V = beta2 * self.V + (1 - beta2) * rotated * rotated
        first = self.Q_L.T @ self.M @ self.Q_R / (1 - beta1**self.t)
        N = self.Q_L @ (first / (np.sqrt(self.V / (1 - beta2**self.t)) + eps)) @ self.Q_R.T
        self.L = beta2 * self.L + (1 - beta2) * G @ G.T
        self.R = beta2 * self.R + (1 - beta2) * G.T @ G
        if self.t % self.f == 0:
            for P, name in ((self.L, "Q_L"), (self.R, "Q_R")):
                if len(P) <= self.max_width:
                    setattr(self, name, np.linalg.qr(P @ getattr(self, name))[0])
        self.t += 1
        return N

    def eigenvectors(self, P: np.ndarray) -> np.ndarray:
        if len(P) > self.max_width:
            return np.eye(len(P))
        return np.linalg.eig(P)[1][:, np.argsort(-np.linalg.eig(P)[0])]


# A side longer than the other has no eigenbasis of its own in the first Gram matrix.
@pytest.mark.parametrize(
    ("shape", "max_width"), [((12, 12), 12), ((12, 20), 12), ((20, 12), 12), ((12, 20), 4)]
)
def test_updates_are_those_of_the_paper(shape, max_width):
    """Twenty steps in float64, with gradients whose directions differ in size."""
    settings = Soap(peak_lr=0.0, max_width=max_width, refresh_updates=3)
    by_hand = SoapByHand(max_width, 3)
    states = {
        key: torch.zeros(of_state, dtype=torch.float64)
        for key, of_state in settings.whole_states(shape).items()
    }
    draw, sizes_I = np.random.default_rng(1), np.geomspace(1, 0.1, shape[1])
    shared_OI = draw.normal(size=shape)
    for number in range(1, 21):
        gradient_OI = (shared_OI + draw.normal(size=shape)) * sizes_I
        update = settings.direction(
            torch.from_numpy(gradient_OI), torch.float32, states, GroupStep(1e-3, 0.1, number)
        )
        expected = by_hand.step(gradient_OI)
        error = np.abs(update.numpy() - expected).max()
        assert error <= 1e-9 * max(1.0, np.abs(expected).max()), number
    assert np.abs(expected).max() > 0.1


def test_flops_are_those_that_torch_counts():
    settings, shape = Soap(peak_lr=0.0, refresh_updates=1), (24, 16)
    states = {key: torch.rand(of_state) for key, of_state in settings.whole_states(shape).items()}
    with FlopCounterMode(display=False) as counter:
        settings.direction(torch.rand(shape), torch.float32, states, GroupStep(1e-3, 0.1, 2))
    assert counter.get_total_flops() == settings.direction_flops(shape)


def test_completep_has_no_rule_for_it(tmp_path, inputs):
    with pytest.raises(ValidationError, match="no rule of completep is known for the rate of soap"):
        make_run(tmp_path / "run", **inputs, optimizer=SOAP, parametrization="completep")


def states_of(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """This rank's weights, states cut as weights are, and states of whole matrices, by name."""
    if hasattr(engine, "_sharding"):
        inner, of_matrices = engine._optimizer, engine._matrix_states
    else:
        inner, of_matrices = engine._state.inner_optimizer, engine._state.of_matrices
    cut = [
        state[key]
        for group in inner.param_groups
        for state in map(inner.state.get, group["params"])
        for key in state
    ]
    whole = {
        f"{name} {key}": of_matrices[name][key] for name in of_matrices for key in of_matrices[name]
    }
    named: dict[str, dict[Any, torch.Tensor]] = {
        "weights": dict(enumerate(engine.weights())),
        "cut": dict(enumerate(cut)),
        "whole": whole,
    }
    return {
        kind: {str(key): tensor.detach().clone() for key, tensor in tensors.items()}
        for kind, tensors in named.items()
    }


def train(engine: Any, steps: range) -> None:
    """Make these updates, each on its batch."""
    for step in steps:
        batch = Batch.of(BATCHES[step - 1]).of_replica(engine.replica)
        engine.train_step(batch, learning_rate(engine.run, step), lambda _: True)


def resume(root: str, *names: str) -> None:
    """Worker, on every rank: six updates, the last three again from a state, which others load."""
    device, (first, *others) = start(), [load_run(Path(root) / name / "run.json") for name in names]
    engine = build_engine(first, device)
    draw_weights(engine, first)
    train(engine, range(1, 4))
    save(engine, Path(root) / "state")
    saved = states_of(engine)
    train(engine, range(4, 7))
    straight = states_of(engine)
    leave_layout(first)

    engine = build_engine(first, device)
    engine.load(Path(root) / "state")
    train(engine, range(4, 7))
    assert_equal(straight, states_of(engine))
    leave_layout(first)

    # At another layout a rank computes other matrices, here all of them or half.
    for run in others:
        with mock.patch.object(matrices, "ROUND_ELEMENTS", 1):
            engine = build_engine(run, device)
        engine.load(Path(root) / "state")
        loaded = states_of(engine)["whole"]
        everyone = {key: each for part in gathered(saved["whole"]) for key, each in part.items()}
        assert loaded
        assert loaded.keys() != saved["whole"].keys()
        assert all(torch.equal(each, everyone[key]) for key, each in loaded.items())
        leave_layout(run)
    sizes = {kind: sum(4 * each.numel() for each in saved[kind].values()) for kind in saved}
    (Path(root) / f"{dist.get_rank()}.json").write_text(json.dumps(sizes))
    engine.close()


def assert_equal(first, second):
    """Every tensor of every kind is the same, bit for bit."""
    assert first.keys() == second.keys()
    for kind in first:
        assert first[kind].keys() == second[kind].keys()
        for key, tensor in first[kind].items():
            assert torch.equal(tensor, second[kind][key]), (kind, key)


def resumed(root: Path, first: RunConfig, other: RunConfig) -> list[dict[str, int]]:
    """Bytes of the states on two ranks by kind, after what `resume` checks."""
    on_ranks(2, resume, root, first.name, other.name)
    return [json.loads((root / f"{rank}.json").read_text()) for rank in range(2)]


def test_states_resume_and_load_at_another_layout(tmp_path, inputs):
    """The state of two tensor ranks, which have the same whole states, on two replicas."""
    settings: dict[str, Any] = {"layers": 3, "kv_heads": 2, "optimizer": SOAP}
    first = make_run(tmp_path / "first", **inputs, **settings, tensor=2)
    held = resumed(tmp_path, first, make_run(tmp_path / "other", **inputs, **settings))
    # Readers of weights pass over states of any shape.
    assert (
        read_shards(tmp_path / "state", first.model).keys() == parameter_shapes(first.model).keys()
    )
    assert held[0] == held[1]
    planned = rank_memory(first, 2).components
    assert held[0]["cut"] == planned["optimizer states, fp32"]
    assert held[0]["whole"] == planned["states of whole matrices, fp32"]
    # By hand: moments of a layer of 3 x 32 x 64 + 2 x 32^2 + 2 x 16 x 32, Gram matrices and bases
    # of both sides of two matrices 32 x 32, two 16 x 32, two 64 x 32 and one 32 x 64.
    bases = 2 * (2 * (32**2 + 32**2) + 2 * (16**2 + 32**2) + 3 * (64**2 + 32**2))
    moments = 2 * (3 * 32 * 64 + 2 * 32**2 + 2 * 16 * 32)
    assert held[0]["whole"] == 4 * 3 * (moments + bases)


def test_states_resume_and_load_in_deepspeed(tmp_path, inputs):
    """The state of one round of all matrices in rounds of two, of which each rank computes one."""
    settings: dict[str, Any] = {
        "layers": 3,
        "kv_heads": 2,
        "optimizer": SOAP,
        "engine": "deepspeed",
    }
    first = make_run(tmp_path / "first", **inputs, **settings)
    held = resumed(tmp_path, first, make_run(tmp_path / "other", **inputs, **settings))
    planned = rank_memory(first, 2).components
    assert max(each["whole"] for each in held) == planned["states of whole matrices, fp32"]
    for each in held:  # DeepSpeed pads every group
        assert 0 <= each["cut"] - planned["optimizer states, fp32"] < 256
    written = sum(path.stat().st_size for path in (tmp_path / "state").glob("*.safetensors"))
    # names of tensors, before their content
    assert 0 <= written - checkpoint_bytes(first).full_each < 100_000
