"""Training at rounded and noisy weights, against a plain loop in fp64 and the definitions.

Shapes: O outputs, I inputs, B sequences, S tokens.
"""

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM

from base.environment import is_rank_zero
from base.errors import UserError
from base.files import write_json
from base.frozen import fingerprint
from base.hessian import product_dtype
from base.random_words import words
from base.ranks import ALONE
from ckpt_tools.export import export
from quant_eval.group import LinearGroup
from quant_eval.specs import parse_spec
from tests.ckpt_tools.checkpoints import read_weights
from tests.quant_eval.gptq_reference import closest, grid_points
from tests.quant_eval.specs import grid_spec
from tests.runs import leave_layout, make_run, on_ranks, python, ranks, succeed
from tests.train import independent
from tests.train.plain import adamw, losses_of_labels, update
from tests.train.test_refusals import edit
from tests.train.trajectories import assert_same, copy_until, numbers
from train.data.batches import Batch
from train.distributed import start
from train.engine import Change, Engine, LinearPart
from train.model import megatron_names
from train.model.config import parameter_shapes
from train.model.initialization import initial_parameter
from train.perturbing import train_step_of
from train.run.config import BranchFrom, RunConfig, load_run
from train.run.directory import RunDirectory, read_checkpoint_record
from train.run.optimization import Lawa, SpikeConfig
from train.run.parallel import ZeroConfig
from train.run.perturbation import Noise, Qat
from train.run.probe import ProbeConfig
from train.run_data import open_data
from train.weight_changes import centered, noisy, rounded

RATE, Z_LOSS = 1e-2, 1e-5
# Of a gradient, by its L2 norm; seen: 1.4e-6 and 0.13. An engine in bf16 rounds weights in bf16,
# some to other points than the plain loop; that rounded weights are right is shown by equality.
MOST = {"fp32": 2e-6, "bf16": 0.3}
# A rank of tensor parallelism has half of a row of o_proj and down_proj: 16 and 32 inputs.
SOME = Qat(spec="rtn-b3-perchannel-asym", linears=("q_proj", "up_proj", "o_proj"), from_step=1)
ALL = Qat(spec="rtn-b3-g16", from_step=1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2, "perturbation": SOME},
    "sp2": {"tensor": 2, "sequence": True, "perturbation": ALL, "recompute": "layers"},
    "pp2": {"pipeline": 2, "perturbation": SOME},
    "bf16-tp2": {"tensor": 2, "perturbation": SOME, "precision": "bf16"},
    "zero1": {"engine": "deepspeed", "zero": ZeroConfig(stage=1), "perturbation": SOME},
    "zero2": {"engine": "deepspeed", "zero": ZeroConfig(stage=2), "perturbation": ALL},
    "zero3": {"engine": "deepspeed", "zero": ZeroConfig(stage=3), "perturbation": ALL},
}
GRIDS = (
    *(f"rtn-b{bits}-g32" for bits in range(2, 9)),
    *("rtn-b4-perchannel", "rtn-b3-g8-asym", "rtn-b4-g16-s16", "fp8-a16", "fp8e5m2-a16"),
    *("mxfp8-a16", "mxfp4-a16", "nvfp4-a16"),
    *("ternary-perchannel", "ternary-g32", "binary-g16", "binary-perchannel"),
)
NOISES = (
    Noise(spec="rtn-b4-g32", from_step=1),
    Noise(spec="rtn-b3-perchannel-asym", distribution="uniform", size=0.5, from_step=1),
)
GROUPS = (
    *(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)),
    *(("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)),
)  # of linears that read the same input


class Given(NamedTuple):
    """The weights before a step of the plain loop, and the gradients there; by HF name."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def batch_of(step: int) -> Batch:
    """Return sequences without the token 0, at which `independent` would end documents."""
    generator = torch.Generator().manual_seed(step)
    return Batch.of(torch.randint(1, 320, (8, 33), generator=generator))


# --- the plain loop ---


def to_points(weight_OI: Tensor, spec: str) -> Tensor:
    """Each weight's nearest point of its group, from the definition of the points, in fp64."""
    grid = grid_spec(spec)
    rounded_OI = weight_OI.detach().numpy().copy()
    for row_I in rounded_OI:
        for group_K in np.split(row_I, len(row_I) // (grid.group_size or len(row_I))):
            points_P = grid_points(group_K, grid)
            group_K[:] = closest(group_K, np.broadcast_to(points_P, (len(group_K), len(points_P))))
    return torch.from_numpy(rounded_OI)


def plain_steps(run: RunConfig, settings: Qat, count: int) -> Iterator[Given]:
    """Yield steps of training with torch's AdamW and a straight-through estimator."""
    weights = {
        name: initial_parameter(name, run.model, run.seed).double().requires_grad_(True)
        for name in parameter_shapes(run.model)
    }
    optimizer = adamw(weights)
    for step in range(1, count + 1):
        seen = dict(weights)
        for name, weight in weights.items():
            if "_proj." in name and (
                not settings.linears or name.split(".")[-2] in settings.linears
            ):
                # Forward takes the rounded weight, and backward passes its gradient straight on.
                seen[name] = weight + (to_points(weight, settings.spec) - weight).detach()
        tokens_BS = batch_of(step).tokens_BS
        log_z_BS = (logits := independent.logits_of(seen, tokens_BS[:, :-1])).logsumexp(-1)
        losses_BS = log_z_BS - logits.gather(-1, tokens_BS[:, 1:, None]).squeeze(-1)
        optimizer.zero_grad()
        (losses_BS + Z_LOSS * log_z_BS.square()).mean().backward()
        gradients = {
            name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None
        }
        yield Given({name: weight.detach().float() for name, weight in weights.items()}, gradients)

        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        update(optimizer, RATE)
        with torch.no_grad():
            for weight in weights.values():  # an engine's are fp32
                weight.copy_(weight.float())


# --- on ranks ---


def expected_parts(engine: Any, gradients: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what a rank of an engine has of each gradient, and that part of the expected one."""
    if engine.run.engine == "deepspeed":
        from train.deepspeed.sharding import by_piece

        for piece, part in by_piece(engine._partitions, engine.gradients()):
            whole = gradients[piece.name].flatten()
            yield part, whole[piece.start : piece.start + piece.length]
        return
    from megatron.core import parallel_state

    from train.megatron.model import global_parameters

    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in global_parameters(engine._pipeline.model.module).items():
        whole = megatron_names.from_hf(name, gradients.__getitem__, engine.run.model)
        part = megatron_names.shard(name, whole, rank, engine.run.parallel.tensor)
        yield vars(parameter)["main_grad"], part


def relative_error(engine: Engine, gradients: dict[str, Tensor]) -> float:
    """The L2 norm of the difference of all gradients over that of the expected ones."""
    squares = torch.zeros(2, dtype=torch.float64)
    for part, expected in expected_parts(engine, gradients):
        squares[0] += (part.double() - expected).square().sum()
        squares[1] += expected.square().sum()
    dist.all_reduce(squares)
    return float((squares[0] / squares[1]).sqrt())


def bits_of(engine: Engine) -> list[Tensor]:
    """Copies of all that an update could change of the weights."""
    pieces = [piece for linear in engine.linears() for piece in linear.pieces]
    return [tensor.clone() for tensor in (*pieces, *engine.weights())]


def use_layouts(root: str, names_json: str) -> None:
    """Worker, on every rank: compare each layout's engine with the plain loop and the whole."""
    from train.engines import build_engine

    device = start()
    for name in json.loads(names_json):
        run = load_run(Path(root) / name / "run.json")
        assert isinstance(run.perturbation, Qat)
        engine = build_engine(run, device)
        steps = torch.load(Path(root) / f"{run.perturbation.spec}.pt", weights_only=True)
        errors = errors_of(run, engine, steps)
        equals_whole(run, engine, steps[-1]["weights"])
        if is_rank_zero():
            write_json(Path(root) / name / "errors.json", errors)
        leave_layout(run)
    engine.close()


def errors_of(run: RunConfig, engine: Engine, steps: list[dict[str, dict[str, Tensor]]]) -> Any:
    """The error of the gradient at each step of the plain loop; no step is accepted."""
    errors: list[float] = []

    def accept(expected: dict[str, Tensor], _: object) -> bool:
        errors.append(relative_error(engine, expected))
        return False

    for step, given in enumerate(steps, 1):
        engine.start_from(given["weights"].__getitem__)
        before = bits_of(engine)
        batch = batch_of(step).of_replica(engine.replica)
        compare = partial(accept, given["gradients"])
        train_step_of(run, engine, step)(batch, RATE, compare)
        # Rejected: all is what it was.
        assert all(map(torch.equal, before, bits_of(engine)))
    return errors


def equals_whole(run: RunConfig, engine: Engine, weights: dict[str, Tensor]) -> None:
    """Rounded and noisy weights of a rank are its parts of those that one process makes."""
    dtypes = {linear.name: linear.pieces[0].dtype for linear in engine.linears()}
    assert {name.split(".")[-2] for name in dtypes} == {
        name.split(".")[-1] for group in GROUPS for name in group
    }
    (dtype,) = set(dtypes.values())
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    for spec in GRIDS:
        change = rounded(Qat(spec=spec, from_step=1), run, engine.linears())
        expected = as_quant_eval_rounds(weights, spec)
        for linear in engine.linears():
            assert torch.equal(changed(linear, change), part_of(linear, expected)), (spec, linear)
    for settings in NOISES:
        change, of_whole = (noisy(settings, run, 7) for _ in range(2))
        expected = {name: changed(LinearPart(name, (weights[name],)), of_whole) for name in dtypes}
        for linear in engine.linears():
            assert torch.equal(changed(linear, change), part_of(linear, expected)), linear


def changed(linear: LinearPart, change: Change) -> Tensor:
    result = change(linear, torch.cat(linear.pieces))
    assert result is not None
    return result


def part_of(linear: LinearPart, whole: dict[str, Tensor]) -> Tensor:
    rows, columns = sum(map(len, linear.pieces)), linear.pieces[0].shape[1]
    return whole[linear.name][linear.row :, linear.column :][:rows, :columns]


def as_quant_eval_rounds(weights: dict[str, Tensor], spec: str) -> dict[str, Tensor]:
    """All linears by a spec: those that read the same input stacked, as quant_eval stacks them."""
    result = dict[str, Tensor]()
    for layer in range(2):
        for group in GROUPS:
            names = [f"model.layers.{layer}.{module}.weight" for module in group]
            stacked_OI = torch.cat([weights[name] for name in names])
            sizes = [len(weights[name]) for name in names]
            products = product_dtype(stacked_OI.dtype)
            linears = LinearGroup(names[0], sizes, stacked_OI, None, products, ALONE)
            dense_OI = parse_spec(spec).round(linears).dense_OI
            result |= dict(zip(names, dense_OI.split(sizes), strict=True))
    return result


@pytest.mark.parametrize(
    ("names", "count"),
    [
        pytest.param(("tp2", "zero3"), 5, id="tp2-zero3"),
        pytest.param(tuple(LAYOUTS), 20, id="all", marks=pytest.mark.stress),
    ],
)
def test_gradients_are_those_of_a_plain_loop_at_every_layout(tmp_path, inputs, names, count):
    """Straight through, over some steps of training. On the same engines rejected steps change no
    bit, and rounded and noisy weights of every grid equal those of whole weights.

    Engines compute in fp32, which alone leaves MOST: transformers' model in fp32, without this
    project's code, is as far from the plain loop.
    """
    runs = {}
    for name in names:
        settings = {"micro_batch_size": 4, "kv_heads": independent.KV_HEADS} | LAYOUTS[name]
        runs[name] = make_run(tmp_path / name, **inputs, **settings)
    for perturbation in (SOME, ALL):
        steps = [each._asdict() for each in plain_steps(runs[names[0]], perturbation, count)]
        torch.save(steps, tmp_path / f"{perturbation.spec}.pt")
    on_ranks(2, use_layouts, tmp_path, json.dumps(names))
    for name, run in runs.items():
        errors = json.loads((tmp_path / name / "errors.json").read_text())
        assert len(errors) == count
        assert max(errors) < MOST[run.precision], name


# --- numbers of the noise ---


def test_noise_is_a_function_of_seed_step_name_and_place(tmp_path, inputs):
    """Weights of a part, one by one: the word of the place, its normal quantile, its group's step.

    The quantile of the table is off by up to 5e-7, and a sum in fp32 by 2^-24 of it.
    """
    run = make_run(tmp_path / "run", **inputs)
    name, settings = "model.layers.1.mlp.down_proj.weight", NOISES[0]
    weight_OI = 0.1 * torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    part_OI = weight_OI[8:24, 32:]
    noisy_OI = changed(LinearPart(name, (part_OI,), 8, 32), noisy(settings, run, 12))
    drawn = random.Random(0)
    for _ in range(200):
        row, column = drawn.randrange(16), drawn.randrange(32)
        place = (row + 8) * 64 + column + 32
        word = int(words(f"3/12/{name}", place, place + 1)) >> 32  # 32 bits and their sign
        magnitude = (word & (2**31 - 1)) + 0.5
        normal = -NormalDist().inv_cdf(magnitude * 2.0**-32) * (-1 if word < 0 else 1)
        step = 2 * part_OI[row].abs().max().item() / 15
        expected = part_OI[row, column].item() + step * normal / 12**0.5
        assert noisy_OI[row, column].item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("distribution", ["uniform", "gaussian"])
def test_noise_has_the_variance_of_rounding_errors(distribution):
    """1 / 12 of a step squared. The mean of squares of n has a standard error of 0.12 / sqrt(n)."""
    halves = (words("a stream", 0, 1 << 20) >> 32).int()
    numbers = centered(halves, distribution).double()
    assert numbers.square().mean().item() == pytest.approx(1 / 12, abs=4 * 0.12 / 1024)
    assert abs(numbers.mean().item()) < 4 * 0.29 / 1024
    assert (numbers.abs().max().item() < 0.5) == (distribution == "uniform")


# --- whole runs ---

RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "qat": (1, {"perturbation": Qat(spec="nvfp4-a16", from_step=8)}),
    "noise": (
        1,
        {"engine": "deepspeed", "perturbation": Noise(spec="rtn-b3-g16", from_step=8)},
    ),
    "qat-tp2": (2, {"tensor": 2, "perturbation": Qat(spec="rtn-b3-perchannel", from_step=8)}),
    "noise-zero2": (
        2,
        {
            "engine": "deepspeed",
            "zero": ZeroConfig(stage=2),
            "perturbation": Noise(spec="rtn-b3-g16", from_step=8),
        },
    ),
    "qat-zero3": (
        2,
        {
            "engine": "deepspeed",
            "zero": ZeroConfig(stage=3),
            "perturbation": Qat(spec="rtn-b3-g16", from_step=8),
            "averages": (Lawa(interval_steps=2, window=2),),
            "probe": ProbeConfig(every_steps=5, sequences=5, group_size=16),
        },
    ),
}
COMMON: dict[str, Any] = {
    "observe_every_steps": 5,
    "probe": ProbeConfig(every_steps=5, sequences=5, group_size=16, layers=()),
    "spikes": SpikeConfig(window_steps=128),
}


def loss_of_export(directory: RunDirectory, out: Path, spec: str | None) -> float:
    """The training loss of step 11 by transformers, of the exported weights of step 10, rounded."""
    export(directory.checkpoint(10), out)
    model = AutoModelForCausalLM.from_pretrained(out)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    if spec:
        with torch.no_grad():
            for name, rounded_OI in as_quant_eval_rounds(weights, spec).items():
                weights[name].copy_(rounded_OI)
    data = open_data(load_run(directory.run_json), directory, verify_hashes=False)
    tokens_BS = data.batch(11).tokens_BS
    losses_BS, _ = losses_of_labels(model(tokens_BS[:, :-1]).logits, tokens_BS)
    return losses_BS.mean().item()


def rows_by_step(directory: RunDirectory) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in numbers(directory.path)}


def test_a_run_begins_unchanged_and_trains_exact_weights_at_rounded_ones(tmp_path, inputs, trained):
    """With a probe, norms by layer and a judge of spikes; then a branch that rounds no more."""
    directory = RunDirectory(tmp_path / "qat")
    make_run(directory.path, **inputs, **(COMMON | RUNS["qat"][1]))
    succeed(python("train", "run", str(directory.path)))
    rows = rows_by_step(directory)

    # Before its first step it is the run without it.
    plain = rows_by_step(RunDirectory(trained("dp1")))
    names = ("loss", "grad_norm")
    for step in range(1, 8):
        assert [rows[step][name] for name in names] == [plain[step][name] for name in names]
    assert rows[8]["loss"] != plain[8]["loss"]

    # What is rounded is the export, as quant_eval rounds it; the export itself is exact.
    loss = loss_of_export(directory, tmp_path / "hf", "nvfp4-a16")
    assert rows[11]["loss"] == pytest.approx(loss, abs=1e-6)
    weights = read_weights(directory.checkpoint(10))
    down_OI = weights["model.layers.0.mlp.down_proj.weight"]
    assert len(down_OI.unique()) > 2000
    squares = [w.double().square().sum() for name, w in weights.items() if ".layers.0." in name]
    norm = sum(squares, torch.zeros(())).sqrt().item()
    assert rows[10]["weight_norm/layers.0"] == pytest.approx(norm, rel=1e-6)
    assert rows[10]["quantization/held_out_loss"] == pytest.approx(rows[10]["held_out_loss"])

    # The judge began anew with the losses at rounded weights.
    assert len(read_checkpoint_record(directory.checkpoint(10)).judged_steps) == 3

    branch_from = BranchFrom(
        run=str(directory.path), step=10, fingerprint=fingerprint(load_run(directory.run_json))
    )
    branch = RunDirectory(tmp_path / "branch")
    make_run(branch.path, **inputs, branch_from=branch_from, save_steps=(20,))
    succeed(python("train", "run", str(branch.path)))
    exact = loss_of_export(directory, tmp_path / "exact", None)
    assert rows_by_step(branch)[11]["loss"] == pytest.approx(exact, abs=1e-6)
    assert abs(exact - loss) > 1e-5


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("noise", (10,)),
        *(pytest.param(name, range(20), marks=pytest.mark.stress) for name in RUNS),
    ],
)
def test_a_resumed_run_is_bit_identical(tmp_path, inputs, name, steps):
    processes, settings = RUNS[name]
    whole = RunDirectory(tmp_path / "whole")
    save_steps = tuple(sorted({*steps, 20}))
    make_run(whole.path, **inputs, **(COMMON | settings), save_steps=save_steps)
    succeed(ranks(processes, "train", "run", str(whole.path)))
    for step in steps:
        again = copy_until(step, whole, tmp_path / f"from-{step}")
        succeed(ranks(processes, "train", "run", str(again.path)))
        assert_same(again, whole, 20)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spec": "rtn-b3-g17x"}, "'g17x' is not understood"),
        ({"spec": "gptq-b3-g16"}, "does not round to nearest; give for example rtn-b3-g128"),
        ({"spec": "mxfp4"}, "not the name of a grid of weights alone; write mxfp4-a16"),
        ({"spec": "w4a4-g16-quarot"}, "write rtn-b4-g16"),
        ({"spec": "rtn-b3-g16-sym"}, "write rtn-b3-g16"),
        ({"spec": "rtn-b3-g48"}, "group size 48 does not divide the 64 input features of model"),
        ({"linears": ["down_prj"]}, "did you mean down_proj"),
        ({"linears": ["lm_head"]}, "no linear of the blocks has that name; take one of"),
        ({"kind": "noise", "spec": "nvfp4-a16"}, "nvfp4-a16 has other numbers; give for example"),
        ({"from_step": 21}, "is after the last step 20; lower it"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, inputs, changes, words):
    make_run(tmp_path / "run", **inputs)
    settings = {"kind": "qat", "spec": "rtn-b3-g16"} | changes
    edit(tmp_path / "run", {"perturbation": settings})
    with pytest.raises(UserError, match=words):
        load_run(tmp_path / "run" / "run.json")


def test_groups_have_to_divide_the_inputs_of_changed_linears_alone(tmp_path, inputs):
    settings = Qat(spec="rtn-b3-g64", linears=("down_proj",))
    make_run(tmp_path / "run", **inputs, perturbation=settings)
    with pytest.raises(ValidationError, match="does not divide the 32 input features"):
        make_run(tmp_path / "other", **inputs, perturbation=Qat(spec="rtn-b3-g64"))
