"""SAM on both engines at every layout against a plain loop in fp64, written from the two papers."""

import json
import math
from contextlib import nullcontext
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
from tests.runs import draw_weights, leave_layout, make_run, on_ranks, python, save, succeed
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
from train.run.optimization import ConstantPhase, ScheduleConfig, SpikeConfig
from train.run.parallel import ZeroConfig
from train.run.perturbation import Sam

BATCH, RATE = 8, 1e-3
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
    "zero3": (2, {"engine": "deepspeed", "zero": ZeroConfig(stage=3)}),
    "bf16": (1, {"precision": "bf16"}),
    "bf16-pp2": (2, {"precision": "bf16", "pipeline": 2}),
    "bf16-zero2": (2, {"precision": "bf16", "engine": "deepspeed", "zero": ZeroConfig(stage=2)}),
}
# Short enough for rounding not to grow: rho 0.1 multiplies a difference by 1e5 in 20 steps.
ASCENTS: dict[str, dict[str, Any]] = {
    "sam": {"rho": 0.02},
    "adaptive": {"rho": 0.5, "adaptive": True},
}
# Layout, kind of ascent, sequences of a group and whether the head is the embedding.
QUICK = (
    ("overlapped", "sam", 4, False),
    ("sp2", "adaptive", None, False),
    ("pp2", "adaptive", 4, True),
    ("zero2", "adaptive", 4, True),
    ("zero3", "sam", 4, False),
    ("bf16-pp2", "sam", None, False),
)
Case = tuple[str, str, int | None, bool]


def batch_of(step: int) -> Batch:
    """Sequences in which every token leaves its successor two choices; of some more labels count.

    None has the token 0: no document ends.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(64, (BATCH,), generator=generator)]
    for _ in range(32):
        tokens.append((3 * tokens[-1] + torch.randint(2, (BATCH,), generator=generator)) % 64)
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
        optimizer=AdamW(peak_lr=RATE, clip_grad_norm=independent.CLIP, z_loss=independent.Z_LOSS),
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

    def held_out(self) -> float:
        """Return a loss of the model as it is."""
        return self.engine.evaluate(batch_of(0).of_replica(self.engine.replica))


def train_all(root: str, names_json: str, steps: str) -> None:
    """Worker, on every rank: train the runs one after another, and save what they did."""
    from train.engines import build_engine

    device, half = start(), int(steps) // 2
    for name in json.loads(names_json):
        directory = Path(root) / name
        run = load_run(directory / "run.json")
        overlaps = mock.patch.multiple("train.megatron.data_parallel", **OVERLAPPED)
        with overlaps if name.startswith("overlapped") else nullcontext():
            rank = Rank(run, build_engine(run, device))
            rows = [rank.step(number).figures for number in range(1, half + 1)]
            check_rejections(rank)
            rows += [rank.step(number).figures for number in range(half + 1, 2 * half + 1)]
        assert rank.flags_asked == len(rows) + 3
        save(rank.engine, directory / "end")
        if is_rank_zero():
            write_json(directory / "rows.json", rows)
        leave_layout(run)
    rank.engine.close()


def check_rejections(rank: Rank) -> None:
    """Rejected steps leave weights and model bit for bit as they were."""
    engine, loss = rank.engine, rank.held_out()
    weights = [weight.clone() for weight in engine.weights()]

    def is_unchanged() -> bool:
        return all(map(torch.equal, engine.weights(), weights)) and rank.held_out() == loss

    asked: list[StepResult] = []

    def reject(result: StepResult) -> bool:
        asked.append(result)
        return False

    rejected = rank.step(1, reject)
    assert asked == [rejected]
    assert is_unchanged()
    # The second pass overflows.
    overflowed = rank.step(1, rho=1e30)
    assert overflowed.loss == rejected.loss
    assert not overflowed.is_finite()
    assert is_unchanged()

    # A step that is too short to move a weight is none.
    short = rank.step(1, lambda _: False, rho=1e-12)
    batch = batch_of(1).of_replica(engine.replica)
    plain = engine.train_step(batch, RATE, lambda _: False)
    assert short.loss == pytest.approx(plain.loss, rel=1e-7)
    assert short.metrics["ascended_loss"] == pytest.approx(plain.loss, rel=1e-7)
    assert short.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)
    assert rejected.metrics["ascended_loss"] > plain.loss


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
        entropy = log_z - logits.gather(-1, batch.tokens_BS[:, 1:, None]).squeeze(-1)
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

    def train(self, steps: int, sequences: int) -> list[dict[str, float]]:
        """Return the figures of every step, whose groups are of so many sequences."""
        optimizer = independent.Optimizer(self.weights, decay="adamw", muon=False)
        rows = []
        for step in range(1, steps + 1):
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


def plain(run: RunConfig, steps: int) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Figures of a plain loop, and its last weights."""
    weights = {
        name: initial_parameter(name, run.model, run.seed, run.scaling_of(name).initial).double()
        for name in parameter_shapes(run.model)
    }
    assert isinstance(run.perturbation, Sam)
    loop = Plain(weights, run.perturbation.rho, run.perturbation.adaptive)
    return loop.train(steps, run.perturbation.sequences or BATCH), weights


def all_cases(precision: str) -> list[Case]:
    """Every kind of ascent at every layout, by groups and with a tied head by batch."""
    return [
        (layout, kind, sequences, sequences is None)
        for layout, (_, settings) in LAYOUTS.items()
        for kind in ASCENTS
        for sequences in (4, None)
        if settings.get("precision", "fp32") == precision
    ]


# Largest relative errors by precision; seen: a third.
MOST = {
    "fp32": {
        **dict.fromkeys(("loss", "z_loss", "ascended_loss"), 2e-7),
        **{"counted_fraction": 0.0, "ascent_length": 1e-6, "grad_norm": 1.5e-5, "weights": 2e-6},
    },
    "bf16": {
        **dict.fromkeys(("loss", "z_loss", "ascended_loss"), 3e-4),
        **{"counted_fraction": 0.0, "ascent_length": 1e-2, "grad_norm": 3e-2, "weights": 1e-2},
    },
}


@pytest.mark.parametrize(
    ("cases", "steps"),
    [
        pytest.param(QUICK, 4, id="some"),
        pytest.param(all_cases("fp32"), 20, id="fp32", marks=pytest.mark.stress),
        # Rounding to bf16 grows: after 10 steps norms of gradients are 7% apart.
        pytest.param(all_cases("bf16"), 6, id="bf16", marks=pytest.mark.stress),
    ],
)
def test_training_equals_the_papers(tmp_path, cases, steps):
    """Figures of every step and weights after the last; groups are the same at any layout.

    What limits it is fp32: an ascent is rounded to 6e-8 of the weight that it is added to, and
    AdamW divides small gradients by their own size.
    """
    runs = {name_of(case): run_of(tmp_path / name_of(case), case) for case in cases}
    for processes in sorted({LAYOUTS[layout][0] for layout, *_ in cases}):
        names = [name_of(case) for case in cases if LAYOUTS[case[0]][0] == processes]
        on_ranks(processes, train_all, tmp_path, json.dumps(names), steps)

    expected: dict[tuple, tuple[list[dict[str, float]], dict[str, Tensor]]] = {}
    for case in cases:
        run, directory, (_, *kind) = runs[name_of(case)], tmp_path / name_of(case), case
        if tuple(kind) not in expected:
            expected[tuple(kind)] = plain(run, steps)
        errors = errors_of(directory, run, *expected[tuple(kind)])
        print(name_of(case), {key: f"{error:.0e}" for key, error in errors.items()})
        most = MOST[run.precision]
        assert errors.keys() == most.keys()
        assert all(error <= most[key] for key, error in errors.items()), name_of(case)


def errors_of(
    directory: Path, run: RunConfig, expected: list[dict[str, float]], last: dict[str, Tensor]
) -> dict[str, float]:
    """Largest relative error of each figure over the steps, and that of all last weights."""
    rows = json.loads((directory / "rows.json").read_text())
    assert all(row.keys() == of.keys() for row, of in zip(rows, expected, strict=True))
    errors = {
        key: max(abs(row[key] / of[key] - 1) for row, of in zip(rows, expected, strict=True))
        for key in rows[0]
    }
    end = directory / "end"
    weights = all_of(HFWeights(end)) if run.engine == "deepspeed" else read_shards(end, run.model)
    apart = sum((weights[key] - last[key]).square().sum().item() for key in last)
    whole = sum(weight.square().sum().item() for weight in last.values())
    return errors | {"weights": math.sqrt(apart / whole)}


def test_a_resumed_run_is_bit_identical(tmp_path, inputs):
    """Every second step from the third on ascends: rows say so, and resuming changes none."""
    whole = RunDirectory(tmp_path / "whole")
    make_run(
        whole.path,
        **inputs,
        micro_batch_size=2,
        total_steps=6,
        save_steps=(0, 3, 6),
        observe_every_steps=2,
        schedule=ScheduleConfig(warmup_tokens=256, phase=ConstantPhase()),
        perturbation=Sam(from_step=3, rho=0.02, sequences=4, every_steps=2),
    )
    succeed(python("train", "run", str(whole.path)))
    again = copy_until(3, whole, tmp_path / "again")
    succeed(python("train", "run", str(again.path)))
    assert_same(again, whole, 6)

    rows = [row for row in numbers(whole.path) if "grad_norm" in row]
    assert [row["step"] for row in rows if "ascended_loss" in row] == [4, 6]
    for row in rows:
        if "ascended_loss" in row:
            assert row["ascended_loss"] > row["loss"]
        if row["step"] % 2 == 0:
            # What is observed is what is clipped: the mean of the groups' gradients.
            squares = sum(row[key] ** 2 for key in row if key.startswith("gradient_norm/"))
            assert math.sqrt(squares) == pytest.approx(row["grad_norm"], rel=1e-5)


def test_results_of_parts_are_joined_by_counted_labels():
    """Sums of cross-entropy 6 over 2 of 8 labels and 8 over 8 of 8; a batch may count none."""
    parts = [StepResult.of([6, 2, 2, 7], 8, 3.0), StepResult.of([8, 4, 8, 9], 8, 5.0)]
    joined = StepResult.joined(parts)
    assert joined == StepResult.of([14, 6, 10, 9], 16, 5.0)
    assert StepResult.joined(parts[1:]) == parts[1]
    none = StepResult.of([0, 0, 0], 8, 0.0)
    assert StepResult.joined([none, none]) == StepResult.of([0, 0, 0], 16, 0.0)
    assert not StepResult.joined([parts[0]._replace(loss=math.inf), parts[1]]).is_finite()


def test_spikes_are_refused_where_some_updates_ascend(tmp_path):
    """Norms after an ascent may be larger: each such update would be skipped as a spike."""
    settings: dict[str, Any] = {"spikes": SpikeConfig()}
    make_run(tmp_path, perturbation=Sam(from_step=1, rho=0.1), **settings)
    with pytest.raises(ValidationError, match=r"every_steps to 1 or spikes to null"):
        make_run(tmp_path, perturbation=Sam(from_step=1, rho=0.1, every_steps=2), **settings)


def test_groups_that_do_not_divide_are_refused(tmp_path):
    """By the batch at once, by the layout when it is known."""
    sam = Sam(from_step=1, rho=0.1, sequences=4)
    with pytest.raises(ValidationError, match=r"batch_size 6 .* perturbation.sequences 4; change"):
        make_run(tmp_path, batch_size=6, micro_batch_size=2, perturbation=sam)
    run = make_run(tmp_path, micro_batch_size=4, perturbation=sam)
    assert run.data_parallel_size(1) == 1
    with pytest.raises(
        UserError, match=r"sequences 4 .* data-parallel size 2 x micro_batch_size 4"
    ):
        run.data_parallel_size(2)
    with pytest.raises(ValidationError, match=r"cuda_graphs .* perturbation.sequences; set cuda_g"):
        make_run(tmp_path, micro_batch_size=1, cuda_graphs=True, perturbation=sam)
