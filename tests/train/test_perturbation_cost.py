"""The cost of perturbed updates: closed forms, counted kernels and bytes, and bytes that are held.

Shapes: O output features (rows), I input features.
"""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quant_eval.formats import FORMATS
from study.recipes.resolve import resolve
from study.results.collect import flops_until
from tests.bench.step import FREE
from tests.runs import draw_weights, leave_layout, on_ranks
from tests.study.claimed import branched, run_of, study_of
from tests.train.operators import Count
from tests.train.test_memory import LENGTH, living, most_bytes, small_run, storages
from train.data.batches import Batch
from train.distributed import start
from train.engine import LinearPart, change_in_place
from train.engines import build_engine
from train.model.config import ModelConfig, parameter_shapes
from train.monitoring import speed_of
from train.perturbing import TrainStep, train_step_of
from train.planning.flops import GPUS, flops_per_token, product_weights, training_flops
from train.planning.memory import DRAWING, rank_memory
from train.planning.memory import ROUNDING as ROUNDING_BYTES
from train.planning.speed import EXPECTED, NOISE, ROUNDING, SLOW, Roofline
from train.run.config import RunConfig, load_run
from train.run.optimization import SmallerBatch
from train.run.parallel import ParallelConfig, ZeroConfig
from train.run.perturbation import Noise, Qat, Sam
from train.run.schedules import perturbed_in_words

H100 = GPUS["h100"]
SAM, QAT = Sam(rho=0.05), Qat(spec="rtn-b3-g128")
NOISY = Noise(spec="rtn-b3-g128")
IN_SMALL = Qat(spec="rtn-b3-g32")  # whose groups divide the widths of small models


def anneals_last_quarter(**changes: Any) -> RunConfig:
    """400 steps, of which the last 100 anneal."""
    return run_of("run", start=300, total=400, **changes)


# Passes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("perturbation", "times"),
    [
        (SAM, 1.25),
        (Sam(rho=0.05, every_steps=5), 1.05),
        (Sam(rho=0.05, from_step=1), 2),
        (IN_SMALL, 1),
    ],
)
def test_flops_and_hours_of_a_run_by_its_closed_form(perturbation, times):
    plain, run = anneals_last_quarter(), anneals_last_quarter(perturbation=perturbation)
    assert training_flops(run, 0, 400) == pytest.approx(times * training_flops(plain, 0, 400))
    rates = FREE._replace(products=0.7)  # nothing else takes time
    hours = [Roofline(each, 1, 8, H100, rates).hours for each in (plain, run)]
    assert hours[1] == pytest.approx(times * hours[0])


@pytest.mark.parametrize("every", [1, 7])
def test_passed_tokens_are_those_of_a_loop_over_updates(every):
    warmup = (SmallerBatch(until_step=30, batch_size=4), SmallerBatch(until_step=90, batch_size=8))
    sam = Sam(rho=0.05, every_steps=every, from_step=20)
    run = anneals_last_quarter(batch_warmup=warmup, perturbation=sam, micro_batch_size=4)
    for after, until in ((0, 400), (25, 29), (25, 95), (31, 400), (0, 19), (90, 91)):
        tokens = sum(
            run.batch_size_at(step) * run.data.sequence_length * (1 + run.perturbed_at(step))
            for step in range(after + 1, until + 1)
        )
        assert run.passed_tokens(after, until) == tokens


def test_a_branch_costs_what_led_to_it():
    """160 steps of its parent, and 40 with two passes."""
    parent = run_of("parent")
    branch = branched(parent, 160, 40).model_copy(update={"perturbation": SAM})
    study = study_of(parent, branch, controls=False)
    a_step = parent.tokens_per_step * flops_per_token(parent.model, parent.data.sequence_length)
    assert flops_until(study, study.trained[1], 200) == (160 + 2 * 40) * a_step
    assert perturbed_in_words(branch) == "SAM rho 0.05: 2 passes of the steps 161 to 200"


def test_a_passed_token_counts_twice_and_a_token_of_data_once():
    run = anneals_last_quarter(perturbation=SAM)
    before, after = (speed_of(run, step, 2.0) for step in (300, 301))
    assert after["tokens_per_second"] == before["tokens_per_second"]
    assert after["model_flops_per_second"] == 2 * before["model_flops_per_second"]


# Kernels and bytes -----------------------------------------------------------


class _Counted(LinearPart):
    """A linear whose copies count as they move: `Count` takes a copy's target for read, too."""

    def copy_(self, weight_OI: torch.Tensor) -> None:
        """Write the weight by an operator that `Count` counts as a read and a write."""
        torch._foreach_copy_(list(self.pieces), [weight_OI])


def changing(perturbation: Qat | Noise, weight_OI: Tensor) -> TrainStep:
    """The step of an engine that has one square linear, and computes nothing."""
    name = "model.layers.0.self_attn.o_proj.weight"
    run, active = run_of("run"), perturbation.model_copy(update={"from_step": 1})
    model = run.model.model_copy(update={"hidden_size": len(weight_OI)})
    run = run.model_copy(update={"model": model, "perturbation": active})
    linears = [_Counted(name, (weight_OI,))]
    engine: Any = SimpleNamespace(
        linears=lambda: linears,
        change_linears=partial(change_in_place, linears),
        train_step=lambda batch, rate, accept, flags: accept(None),
    )
    return train_step_of(run, engine, 1)


def count_of(perturbation: Qat | Noise, dtype: torch.dtype) -> tuple[int, float]:
    """Kernels of a linear, and bytes per weight: the slope over its size.

    The first step of a process builds tables, too, and is not counted.
    """
    counts = {}
    for width in (256, 512):
        step = changing(perturbation, torch.randn(width, width).to(dtype))
        step(None, 1e-3, lambda _: True)
        with Count() as counts[width]:
            step(None, 1e-3, lambda _: True)
    moved = counts[512].bytes - counts[256].bytes
    return counts[512].kernels, moved / (512**2 - 256**2)


GRIDS = {"rtn": "rtn-b3-g128", "ternary": "ternary-g128", "binary": "binary-g128"}
GRIDS |= {name: f"{name}-a16" for name in ROUNDING if name not in GRIDS}


@pytest.mark.parametrize("grid", ROUNDING)
def test_rounding_moves_the_bytes_of_the_roofline(grid):
    row = ROUNDING[grid]
    kernels, moved = count_of(Qat(spec=GRIDS[grid]), torch.bfloat16)
    assert kernels == row.starts
    assert moved == pytest.approx(row.weight, rel=0.02)
    _, wider = count_of(Qat(spec=GRIDS[grid]), torch.float32)
    assert wider - moved == pytest.approx(row.wider, rel=0.02)


def test_every_format_has_a_row():
    assert set(FORMATS) | {"rtn"} == set(ROUNDING)


def test_noise_moves_the_bytes_of_the_roofline():
    kernels, moved = count_of(NOISY, torch.bfloat16)
    assert kernels == NOISE.starts
    assert moved == pytest.approx(NOISE.weight, rel=0.02)
    assert count_of(NOISY, torch.float32)[1] - moved == pytest.approx(NOISE.wider, rel=0.02)


def test_bytes_and_waits_by_hand():
    """At a byte a second; of down_proj alone in half of the layers, on each of two tensor ranks."""
    model = resolve("olmo2-1b-lr", "full").trained[0].model
    perturbation = Qat(spec="rtn-b3-g128", linears=("down_proj",), from_step=1)
    layout = {"parallel": ParallelConfig(tensor=2, pipeline=2, sequence=True)}
    run = of_1b(perturbation).model_copy(update=layout)
    slow, rates = H100._replace(bandwidth=1), FREE._replace(bandwidth=1)
    weights = model.num_hidden_layers / 2 * model.hidden_size * model.intermediate_size / 2
    causes = Roofline(run, 8, 8, slow, rates).perturbation_causes()
    assert causes == {"changing weights": pytest.approx(weights * ROUNDING["rtn"].weight)}
    reads = Roofline(run, 8, 8, H100, FREE._replace(sync=1)).perturbation_causes()
    assert reads == {"changing weights": model.num_hidden_layers / 2}


def of_1b(perturbation: Any) -> RunConfig:
    run = resolve("olmo2-1b-lr", "full").trained[0]
    return run.model_copy(update={"perturbation": perturbation})


@pytest.mark.parametrize("rates", [EXPECTED, SLOW])
@pytest.mark.parametrize("perturbation", [QAT, NOISY])
def test_the_1b_loses_less_than_a_twentieth(perturbation, rates):
    """The assumption: 8 H100s and the recipe's 512 sequences of 4,096 tokens a step, 64 a GPU."""
    roofline = Roofline(of_1b(perturbation), 8, 8, H100, rates)
    assert 1 < roofline.perturbed_seconds / roofline.seconds < 1.05


def test_ascents_of_groups_publish_and_reduce_each():
    """Nothing is hidden: 8 groups, 15 reductions in fp32 and as many gathers in bf16 more."""
    rates = FREE._replace(hidden=0, link=300e9)
    run = of_1b(Sam(rho=0.05, sequences=64, from_step=1))
    roofline = Roofline(run, 8, 8, H100, rates)
    plain = roofline.causes()["between replicas"]
    assert roofline.perturbation_causes() == {"between replicas": pytest.approx(15 * plain)}


@pytest.mark.parametrize(("stage", "reductions", "gathers"), [(1, 15, 15), (2, 8, 15), (3, 8, 16)])
def test_zero_takes_again_what_every_microbatch_takes(stage, reductions, gathers):
    """Nothing is hidden: 8 microbatches of 8 GPUs, of which each is a group with two passes."""
    sam = Sam(rho=0.05, sequences=64, from_step=1)
    zero = {"engine": "deepspeed", "zero": ZeroConfig(stage=stage), "micro_batch_size": 8}
    run = of_1b(sam).model_copy(update=zero)
    rates = FREE._replace(hidden=0, link=300e9)
    (seconds,) = Roofline(run, 8, 8, H100, rates).perturbation_causes().values()
    once = 4 * multiplied_and_looked_up(run.model) * 7 / 8 / 300e9
    assert seconds == pytest.approx((reductions + gathers) * once)


def multiplied_and_looked_up(model: ModelConfig) -> int:
    """Weights but norms, which the roofline leaves out."""
    shapes = parameter_shapes(model).values()
    return sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)


def test_stage_3_gathers_the_linears_once_more():
    """One by one, before any pass; nothing else waits, however much is hidden in a step."""
    zero = {"engine": "deepspeed", "zero": ZeroConfig(stage=3)}
    run = of_1b(QAT).model_copy(update=zero)
    linears = run.model.num_hidden_layers * product_weights(run.model)
    causes = Roofline(run, 8, 8, H100, EXPECTED).perturbation_causes()
    assert causes["waiting for weights"] == pytest.approx(4 * linears * 7 / 8 / EXPECTED.link)


# Memory ----------------------------------------------------------------------


def test_stage_3_keeps_a_share_of_the_exact_weights():
    parts = {
        stage: rank_memory(
            of_1b(QAT).model_copy(update={"engine": "deepspeed", "zero": ZeroConfig(stage=stage)}),
            8,
        ).components
        for stage in (2, 3)
    }
    assert parts[3]["exact weights"] == parts[2]["exact weights"] / 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("perturbation", "planned"),
    [
        *((Qat(spec=GRIDS[grid]), ROUNDING_BYTES) for grid in ("rtn", "nvfp4")),
        (NOISY, DRAWING),
    ],
)
def test_a_changed_linear_takes_no_more_than_planned(perturbation, planned, dtype):
    weight_OI = torch.randn(512, 512).to(dtype)
    step = changing(perturbation, weight_OI)
    step(None, 1e-3, lambda _: True)  # the first call builds tables
    peak = most_bytes(lambda: step(None, 1e-3, lambda _: True), 4096)
    transient = peak / weight_OI.numel() - weight_OI.itemsize
    assert transient < 1.01 * planned  # the scales
    if perturbation.spec != GRIDS["rtn"] or isinstance(perturbation, Noise):
        assert transient > 0.75 * planned


def step_and_measure(*run_dirs: str) -> None:
    """Worker: what two-byte tensors there are more of while an engine makes its step."""
    device = start()
    for run_dir in map(Path, run_dirs):
        run = load_run(run_dir / "run.json")
        engine = build_engine(run, device)
        draw_weights(engine, run)
        batch = Batch.of(torch.randint(320, (run.batch_size, LENGTH + 1)))
        # Kept alive: their addresses stay taken.
        older = living(Tensor)
        known = storages(older)
        sizes: list[int] = []
        make_step = engine.train_step

        def measured(*arguments: Any) -> Any:
            new = {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for tensor in living(Tensor)
                if tensor.dtype == torch.bfloat16 and not storages([tensor]) & known  # noqa: B023
            }
            sizes.append(sum(new.values()))  # noqa: B023
            return make_step(*arguments)  # noqa: B023

        setattr(engine, "train_step", measured)  # noqa: B010 mypy refuses the assignment
        train_step_of(run, engine, 1)(batch.of_replica(engine.replica), 1e-3, lambda _: True)
        rank = torch.distributed.get_rank()
        (run_dir / f"held{rank}.json").write_text(json.dumps(sizes[0]))
        del older
        leave_layout(run)
    engine.close()


def test_an_engine_keeps_the_exact_weights_that_the_plan_counts(tmp_path):
    every = Qat(spec="rtn-b3-g32", from_step=1)
    some = Qat(spec="rtn-b3-g32", from_step=1, linears=("down_proj", "o_proj"))
    layouts = {"tp2": ParallelConfig(tensor=2), "pp2": ParallelConfig(pipeline=2)}
    runs = [
        small_run(
            tmp_path / name,
            replicas=1,
            parallel=layouts[name],
            precision="bf16",
            perturbation=perturbation,
        )
        for name, perturbation in (("tp2", every), ("pp2", some))
    ]
    on_ranks(2, step_and_measure, *(tmp_path / run.name for run in runs))
    for run in runs:
        held = [
            json.loads((tmp_path / run.name / f"held{rank}.json").read_text()) for rank in (0, 1)
        ]
        assert held == [rank_memory(run, 2).components["exact weights"]] * 2, run.name


@pytest.mark.parametrize(("sequences", "copies"), [(None, 1), (8, 1), (4, 2)])
def test_ascents_keep_copies_of_main_weights(tmp_path, sequences, copies):
    """Gradients of four of eight sequences are summed, too: as many as main weights."""
    sam = Sam(rho=0.05, sequences=sequences, from_step=1)
    settings: dict[str, Any] = {"batch_size": 8, "precision": "bf16", "perturbation": sam}
    parts = rank_memory(small_run(tmp_path / "run", **settings), 2).components
    names = ("exact main weights, fp32", "sums of gradients, fp32")
    held = [parts[name] for name in names if name in parts]
    assert held == [parts["main weights, fp32"]] * copies
