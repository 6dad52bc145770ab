"""SAM on both engines at every layout against a plain loop in fp64, written from the two papers."""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor

from base.environment import is_rank_zero
from base.errors import UserError
from base.files import write_json
from ckpt_tools.formats.hf_weights import HFWeights
from tests.ckpt_tools.checkpoints import all_of, read_shards
from tests.runs import draw_weights, leave_layout, make_run, on_ranks, ranks, save, succeed
from tests.train import independent
from tests.train.test_overlap import OVERLAPPED
from tests.train.trajectories import assert_same, copy_until, numbers
from train.data.batches import Batch
from train.distributed import start
from train.engine import Accept, Engine, StepResult
from train.model.config import parameter_shapes
from train.model.initialization import initial_parameter
from train.optimizers.adamw import AdamW
from train.perturbing import train_step_of
from train.run.config import RunConfig, load_run
from train.run.directory import RunDirectory
from train.run.parallel import ZeroConfig
from train.run.perturbation import Sam

STEPS, BATCH, RATE = 20, 8, 1e-3
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    # First, as gathers that do not overlap are made in place, and for good.
    "overlapped": (2, {}),
    "dp1": (1, {}),
    "dp2": (2, {}),
    "sp2": (2, {"tensor": 2, "sequence": True}),
    "pp2": (2, {"pipeline": 2}),
    "zero1": (2, {"engine": "deepspeed", "zero": ZeroConfig(stage=1)}),
    "zero2": (2, {"engine": "deepspeed", "zero": ZeroConfig(stage=2)}),
}
ASCENTS = {"sam": {"rho": 0.1}, "adaptive": {"rho": 0.5, "adaptive": True}}
# Layout, kind of ascent, sequences of a group and whether the head is the embedding.
QUICK = (
    ("overlapped", "sam", 4, False),
    ("dp1", "adaptive", 2, False),
    ("sp2", "adaptive", None, False),
    ("pp2", "adaptive", 4, True),
    ("zero1", "adaptive", 4, False),
    ("zero2", "sam", None, False),
)
Case = tuple[str, str, int | None, bool]


def batch_of(step: int) -> Batch:
    """Sequences in which every token leaves its successor two choices; more labels of some count.

    Without the token 0: a document ends nowhere.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(319, (BATCH,), generator=generator)]
    for _ in range(32):
        tokens.append((3 * tokens[-1] + torch.randint(2, (BATCH,), generator=generator)) % 319)
    counted_BS = torch.rand(BATCH, 32, generator=generator) < torch.linspace(0.2, 1, BATCH)[:, None]
    return Batch(torch.stack(tokens, 1) + 1, counted_BS)


def name_of(case: Case) -> str:
    layout, kind, sequences, tied = case
    return f"{layout}-{kind}-{sequences or 'batch'}{'-tied' if tied else ''}"


def run_of(directory: Path, case: Case) -> RunConfig:
    layout, kind, sequences, tied = case
    run = make_run(
        directory,
        kv_heads=independent.KV_HEADS,
        micro_batch_size=2,
        optimizer=AdamW(
            peak_lr=RATE, clip_grad_norm=independent.CLIP, z_loss=independent.Z_LOSS
        ),
        perturbation=Sam(from_step=1, sequences=sequences, **ASCENTS[kind]),
        **LAYOUTS[layout][1],
    )
    model = run.model.model_copy(update={"tie_word_embeddings": tied})
    run = run.model_copy(update={"model": model})
    write_json(directory / "run.json", run.model_dump(mode="json"))
    return run


class Rank:
    """One rank of a run, and what it does with its engine."""

    def __init__(self, run: RunConfig, engine: Engine) -> None:
        self.run, self.engine = run, engine
        self.flags_asked = 0
        draw_weights(engine, run)

    def flags(self) -> list[float]:
        self.flags_asked += 1
        return [1.0]

    def step(
        self, number: int, accept: Accept = StepResult.is_finite, **changes: Any
    ) -> StepResult:
        """Make a step of the loop, or one with a changed ascent."""
        assert self.run.perturbation is not None
        perturbation = self.run.perturbation.model_copy(update=changes)
        run = self.run.model_copy(update={"perturbation": perturbation})
        batch = batch_of(number).of_replica(self.engine.replica)
        result = train_step_of(run, self.engine, number)(batch, RATE, accept, self.flags)
        assert list(result.flags) == [dist.get_world_size()]
        return result

    def changes_nothing(self, act: Callable[[], StepResult]) -> StepResult:
        """Return the result of a step that leaves weights and model bit for bit as they were."""
        held_out = batch_of(0).of_replica(self.engine.replica)
        loss = self.engine.evaluate(held_out)
        weights = [weight.clone() for weight in self.engine.weights()]
        result = act()
        assert all(map(torch.equal, self.engine.weights(), weights))
        assert self.engine.evaluate(held_out) == loss
        return result


def train_all(root: str, names_json: str) -> None:
    """Worker, on every rank: train the runs one after another, and save what they did."""
    from train.engines import build_engine

    device = start()
    for name in json.loads(names_json):
        directory = Path(root) / name
        run = load_run(directory / "run.json")
        overlaps = mock.patch.multiple("train.megatron.data_parallel", **OVERLAPPED)
        with overlaps if name.startswith("overlapped") else nullcontext():
            rank = Rank(run, build_engine(run, device))
            rows = [rank.step(number).figures for number in range(1, STEPS // 2 + 1)]
            check_rejections(rank)
            rows += [rank.step(number).figures for number in range(STEPS // 2 + 1, STEPS + 1)]
        assert rank.flags_asked == STEPS + 3
        save(rank.engine, directory / "end")
        if is_rank_zero():
            write_json(directory / "rows.json", rows)
        leave_layout(run)
    rank.engine.close()


def check_rejections(rank: Rank) -> None:
    """Rejected steps, one of them as its second pass overflows, change nothing."""
    asked: list[StepResult] = []
    rejected = rank.changes_nothing(lambda: rank.step(1, lambda result: bool(asked.append(result))))
    assert asked == [rejected]
    overflowed = rank.changes_nothing(lambda: rank.step(1, rho=1e30))
    assert math.isfinite(overflowed.loss)
    assert not overflowed.is_finite()

    # An ascent that is too short to move a weight is none.
    short = rank.changes_nothing(lambda: rank.step(1, lambda _: False, rho=1e-12))
    batch = batch_of(1).of_replica(rank.engine.replica)
    plain = rank.changes_nothing(
        lambda: rank.engine.train_step(batch, RATE, lambda _: False)
    )
    assert short.loss == pytest.approx(plain.loss, rel=1e-12)
    assert short.metrics["ascended_loss"] == pytest.approx(plain.loss, rel=1e-6)
    assert short.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)
    assert abs(rejected.grad_norm / plain.grad_norm - 1) > 1e-3


class Plain:
    """The run in fp64 on whole batches, by neither engine nor any module of the project."""

    def __init__(self, weights: dict[str, Tensor], rho: float, adaptive: bool) -> None:
        self.weights, self.rho, self.adaptive = weights, rho, adaptive

    def differentiate(self, batch: Batch) -> tuple[float, float, list[Tensor]]:
        """Return sums of cross-entropy and z-loss over counted labels, and the gradients."""
        for weight in self.weights.values():
            weight.requires_grad_(True)
            weight.grad = None
        tied = {HEAD: self.weights[EMBEDDING]}
        logits = independent.logits_of(tied | self.weights, batch.tokens_BS[:, :-1])
        log_z = logits.logsumexp(-1)
        entropy = (log_z - logits.gather(-1, batch.tokens_BS[:, 1:, None]).squeeze(-1))
        entropy, z_loss = (x * batch.counted_BS for x in (entropy, independent.Z_LOSS * log_z**2))
        ((entropy + z_loss).sum() / entropy.numel()).backward()
        gradients = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        assert len(gradients) == len(self.weights)
        return entropy.sum().item(), z_loss.sum().item(), gradients

    def sharpness_aware(self, batch: Batch) -> tuple[tuple[float, ...], list[Tensor]]:
        """Return sums of both losses, the ascended sum and the ascent's length; the gradients."""
        entropy, z_loss, gradients = self.differentiate(batch)
        exact = [weight.detach().clone() for weight in self.weights.values()]
        # T of the second paper, the identity in the first.
        scales = [weight.abs() if self.adaptive else torch.ones_like(weight) for weight in exact]
        scaled = [scale * gradient for scale, gradient in zip(scales, gradients, strict=True)]
        norm = torch.cat([part.flatten() for part in scaled]).norm()
        ascents = [self.rho * s * part / norm for s, part in zip(scales, scaled, strict=True)]
        self.set([weight + ascent for weight, ascent in zip(exact, ascents, strict=True)])
        ascended, _, gradients = self.differentiate(batch)
        self.set(exact)
        length = torch.cat([ascent.flatten() for ascent in ascents]).norm().item()
        return (entropy, z_loss, ascended, length), gradients

    @torch.no_grad()
    def set(self, values: list[Tensor]) -> None:
        for weight, value in zip(self.weights.values(), values, strict=True):
            weight.copy_(value)

    def train(self, sequences: int) -> list[dict[str, float]]:
        """Return the figures of every step."""
        optimizer = independent.Optimizer(self.weights, decay="adamw", muon=False)
        rows = []
        for step in range(1, STEPS + 1):
            batch = batch_of(step)
            counted = batch.counted_BS.sum().item()
            groups = [
                Batch(*(part[first : first + sequences] for part in batch[:2]))
                for first in range(0, BATCH, sequences)
            ]
            parts, gradients_of = zip(*map(self.sharpness_aware, groups), strict=True)
            entropy, z_loss, ascended, length = map(sum, zip(*parts, strict=True))
            gradients = [torch.stack(each).mean(0) for each in zip(*gradients_of, strict=True)]
            norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
            factor = min(1.0, independent.CLIP / (norm + 1e-6))
            for weight, gradient in zip(self.weights.values(), gradients, strict=True):
                weight.grad = gradient * factor
            optimizer.step(step, RATE)
            rows.append(
                {
                    "loss": entropy / counted,
                    "grad_norm": norm,
                    "z_loss": z_loss / counted,
                    "counted_fraction": counted / batch.counted_BS.numel(),
                    "ascended_loss": ascended / counted,
                    "ascent_length": length / len(groups),
                }
            )
        return rows


@cache
def plain(run: RunConfig) -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Tensor]]:
    """Figures of a plain loop, its first weights and its last ones."""
    first = {
        name: initial_parameter(name, run.model, run.seed, run.scaling_of(name).initial).double()
        for name in parameter_shapes(run.model)
    }
    last = {name: weight.clone() for name, weight in first.items()}
    assert isinstance(run.perturbation, Sam)
    loop = Plain(last, run.perturbation.rho, run.perturbation.adaptive)
    return loop.train(run.perturbation.sequences or BATCH), first, last


def all_cases() -> list[Case]:
    return [
        (layout, kind, sequences, tied)
        for layout in LAYOUTS
        for kind in ASCENTS
        for sequences in (4, None)
        for tied in (False, True)
    ]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(all_cases(), marks=pytest.mark.stress)])
def test_training_equals_the_papers(tmp_path, cases):
    """Figures and weights of 20 steps, with steps rejected between; groups are of any layout.

    In fp32 an ascent is rounded with the weight it is added to, to 6e-8 of that, and AdamW divides
    small gradients by their own size: it is that which limits how far weights agree.
    """
    runs = {name_of(case): run_of(tmp_path / name_of(case), case) for case in cases}
    for processes in (1, 2):
        names = [name_of(case) for case in cases if LAYOUTS[case[0]][0] == processes]
        on_ranks(processes, train_all, tmp_path, json.dumps(names))

    for name, run in runs.items():
        expected, first, last = plain(run.model_copy(update={"name": "-", "engine": "megatron"}))
        rows = json.loads((tmp_path / name / "rows.json").read_text())
        errors = {
            key: max(abs(row[key] / other[key] - 1) for row, other in zip(rows, expected, strict=True))
            for key in expected[0]
        }
        assert rows[0].keys() == expected[0].keys()
        end = tmp_path / name / "end"
        weights = all_of(HFWeights(end)) if run.engine == "deepspeed" else read_shards(end, run.model)
        apart, whole, moved = (
            math.sqrt(sum(of(key).square().sum().item() for key in last))
            for of in (
                lambda key, w=weights: w[key].double() - last[key],
                lambda key: last[key],
                lambda key: last[key] - first[key],
            )
        )
        print(name, {key: f"{error:.0e}" for key, error in errors.items()}, f"{apart / whole:.1e}", f"{apart / moved:.1e}")
