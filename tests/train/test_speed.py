"""The roofline of a step: counted kernels, sums worked by hand, and what was measured."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from study.recipes.resolve import resolve
from tests.bench.step import FREE
from tests.runs import make_run
from tests.train import operators
from train.model.chunks import LOSS_CHUNK_TOKENS
from train.model.config import ModelConfig
from train.model.families import TRAINED
from train.model.presets import OLMO2_1B, OLMO2_7B, OLMO2_190M
from train.planning.flops import GPUS, GpuKind, flops_per_token
from train.planning.speed import (
    EXPECTED,
    FAST,
    KERNELS,
    SLOW,
    Kernels,
    Rates,
    Roofline,
    arrangement_of,
)
from train.run.config import RunConfig
from train.run.parallel import ParallelConfig, ZeroConfig

H, F, V, LAYERS, S = 4096, 11_008, 100_352, 32, 4096  # of OLMo2-7B
LAYER = 4 * H * H + 3 * H * F
H100 = GPUS["h100"]


def run_of(model: ModelConfig = OLMO2_7B, **changes: Any) -> RunConfig:
    """The first run of the 7B's recipe, with changes."""
    run = resolve("olmo2-7b-lr", "full").trained[0]
    return run.model_copy(update={"micro_batch_size": 1, "model": model} | changes)


def at(rates: Rates, gpus: int = 64, gpu: GpuKind = H100, **changes: Any) -> Roofline:
    return Roofline(run_of(**changes), gpus, 8, gpu, rates)


def split(tensor: int = 1, pipeline: int = 1) -> dict[str, Any]:
    return {"parallel": ParallelConfig(tensor=tensor, pipeline=pipeline, sequence=tensor > 1)}


# Counts ----------------------------------------------------------------------


def counted(tmp_path: Path, count: Any, model: ModelConfig, tokens: int, **changes: Any) -> Any:
    """Count a run in bf16 of one sequence of so many tokens."""
    schedule = run_of().schedule
    run = make_run(
        tmp_path / "counted",
        model=model,
        data={"sequence_length": tokens},
        precision="bf16",
        batch_size=1,
        micro_batch_size=1,
        schedule=schedule.model_copy(update={"warmup_tokens": 0}),
        **changes,
    )
    return count(run)


def of_a_layer(tmp_path: Path, count: Any, model: ModelConfig, **changes: Any) -> tuple[int, float]:
    """Kernels of a layer, and the bytes per token: the slope over layers and over tokens."""
    kernels, moved = {}, {}
    for layers in (1, 1, 2):  # once more with the cosines of the rotary embedding there
        for tokens in (16, 32):
            deep = model.model_copy(update={"num_hidden_layers": layers})
            found = counted(tmp_path, count, deep, tokens, **changes)
            kernels[layers], moved[layers, tokens] = found.kernels, found.bytes
    slope = [(moved[layers, 32] - moved[layers, 16]) / 16 for layers in (1, 2)]
    return kernels[2] - kernels[1], slope[1] - slope[0]


def model_of(family: str) -> ModelConfig:
    """The 1B in another family with grouped queries, and with narrow heads where it may have them.

    It is wide, so that what a row leaves out is little.
    """
    narrow = {"head_dim": 64} if TRAINED[family].states_head_dim else {}
    return OLMO2_1B.model_copy(update={"family": family, "num_key_value_heads": 4} | narrow)


MEGATRON = [name for name, training in TRAINED.items() if training.megatron]


@pytest.mark.parametrize("family", TRAINED)
def test_every_family_has_rows(family):
    for engine in ("deepspeed", "megatron") if family in MEGATRON else ("deepspeed",):
        run = run_of(model_of(family), engine=engine)
        assert Roofline(run, 8, 8, H100).hours > 0


@pytest.mark.parametrize(
    "model", [OLMO2_190M, OLMO2_7B, *map(model_of, MEGATRON)], ids=lambda model: model.family
)
def test_kernels_are_those_of_the_engines_own_model(tmp_path, model):
    """A norm's sums per token and the cosines of the rotary embedding are not in the row: 2%.

    `tests.train.test_compiled_layers` has those of DeepSpeed.
    """
    kernels, bytes_per_token = of_a_layer(tmp_path, operators.megatron_layers, model)
    starts = KERNELS[arrangement_of("megatron", model)].starts
    copied = model.num_key_value_heads != model.num_attention_heads
    assert kernels == starts + copied
    assert bytes_per_token == pytest.approx(bytes_by_the_roofline(model), rel=0.02)


@pytest.mark.parametrize("family", ["olmo2", "llama"])
def test_recomputing_between_products_adds_its_passes(tmp_path, family):
    count, model = operators.megatron_layers, OLMO2_190M.model_copy(update={"family": family})
    _, once = of_a_layer(tmp_path, count, model)
    _, twice = of_a_layer(tmp_path, count, model, recompute="selective")
    expected = bytes_by_the_roofline(model, "selective") - bytes_by_the_roofline(model)
    assert twice - once == pytest.approx(expected, rel=0.03)


def bytes_by_the_roofline(model: ModelConfig, recompute: str = "none") -> float:
    """Bytes of kernels of a layer per token: at a byte a second."""
    run = run_of(model.model_copy(update={"num_hidden_layers": 1}), recompute=recompute)
    run = run.model_copy(update={"batch_size": 1})
    slow = H100._replace(bandwidth=1)
    return Roofline(run, 1, 8, slow, FREE._replace(bandwidth=1)).causes()["other kernels"] / S


def test_gradients_of_one_table_move_as_much_as_those_of_two(tmp_path):
    """One is added to the other, and the sum to the buffer: 12 bytes a weight, twice either way."""
    run = make_run(tmp_path / "run", model=OLMO2_190M, data={"sequence_length": 64})
    tied, untied = (operators.tables(run, tied=tied).bytes for tied in (True, False))
    assert tied == untied


def test_bytes_of_a_logit_are_those_of_the_losses(tmp_path):
    of = [
        counted(tmp_path, operators.megatron_loss, OLMO2_190M, chunks * LOSS_CHUNK_TOKENS)
        for chunks in (1, 2)
    ]
    for row in KERNELS.values():
        more = (of[1].bytes - of[0].bytes) / LOSS_CHUNK_TOKENS / OLMO2_190M.vocab_size
        assert more == pytest.approx(row.logit, rel=0.01)
        assert of[1].kernels - of[0].kernels == row.loss_starts


# Sums by hand ----------------------------------------------------------------


@pytest.mark.parametrize("layout", [{}, {"micro_batch_size": 4}, split(tensor=4)])
def test_flops_are_those_of_the_mfu(layout):
    """All GPUs at their peak: 6 FLOPs a weight and token but for norms, which are not products.

    Attention: 6 products over the whole square in the MFU, 7 over its half in fact.
    """
    peak, tokens = 64 * H100.peak_flops, 1024 * S
    products = at(FREE._replace(products=1), **layout).seconds * peak / tokens
    attention = at(FREE._replace(attention=(1, 1)), **layout).seconds * peak / tokens
    assert products == pytest.approx(6 * (LAYERS * LAYER + V * H), rel=1e-9)
    norms = (4 * LAYERS + 1) * H
    flops = flops_per_token(OLMO2_7B, S)
    assert products + attention * 12 / 7 + 6 * norms == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize(
    ("pipeline", "tied", "tables"), [(1, True, 1), (1, False, 2), (2, True, 1)]
)
def test_a_tied_table_is_reduced_and_updated_once(pipeline, tied, tables):
    """One replica, whose optimizer zeroes 4 bytes of a weight and moves 34; a byte a second."""
    model = OLMO2_7B.model_copy(update={"tie_word_embeddings": tied})
    slow, layout = H100._replace(bandwidth=1), split(pipeline=pipeline)
    causes = at(FREE._replace(bandwidth=1), pipeline, slow, model=model, **layout).causes()
    weights = LAYERS // pipeline * LAYER + tables * V * H
    assert causes["optimizer"] == pytest.approx(weights * (4 + 34))


@pytest.mark.parametrize("tensor", [1, 2])
def test_bytes_follow_from_shapes(tensor):
    """At a byte a second, one microbatch of 4,096 tokens on each of the tensor ranks."""
    slow = H100._replace(bandwidth=1)
    roofline = at(FREE._replace(bandwidth=1, sums=0.5), gpu=slow, gpus=tensor, **split(tensor))
    of_a_microbatch = {
        cause: seconds * tensor / 1024 for cause, seconds in roofline.causes().items()
    }
    heads = 2 * H * (2 + 3)  # queries and keys: in and out; gradients
    joined = 3 * H * 2
    swiglu = F * (2 + 1) + F * (3 + 2)
    norms = 2 * H * ((2 + 1) + (2 + 1))  # with residual; gradients
    sums = 2 * H * (2 + 1)  # of the residual's two gradients
    passes = S * (heads + joined + swiglu + norms + sums)
    assert of_a_microbatch["other kernels"] == pytest.approx(LAYERS * 2 * passes)
    # by the product, which hides half of it
    assert of_a_microbatch["sums of gradients"] == pytest.approx(LAYERS * LAYER * (4 + 4) / 2)
    assert of_a_microbatch["loss"] == pytest.approx(S * V * (2 + 2))
    chunks = S / LOSS_CHUNK_TOKENS * (4 + 4) / 2  # half of them hidden
    # zeros; scaled; then read and added
    assert of_a_microbatch["its gradient"] == pytest.approx(V * H * (4 + 8 + 12 + chunks))
    assert of_a_microbatch["embedding"] == pytest.approx(V * H * (4 + 12))


def test_communication_by_closed_forms():
    """Bytes over bytes per second, nothing hidden; 7.3e9 weights."""
    weights = LAYERS * LAYER + 2 * V * H
    # 64 replicas over 8 nodes: gradients in fp32, weights in bf16, by 8 adapters
    over_nodes = FREE._replace(hidden=0, network=25e9)
    assert at(over_nodes).seconds == pytest.approx(weights * (4 + 2) * 63 / 64 / 200e9)
    # 8 in a node
    links = FREE._replace(hidden=0, link=300e9)
    assert at(links, 8).seconds == pytest.approx(weights * 6 * 7 / 8 / 300e9)
    # tensor 2: 32 microbatches of 32 layers; in each 6 x half of 4,096 x 4,096 in bf16
    sent = 32 * LAYERS * 6 * S * H * 2 / 2
    assert at(FREE._replace(link=1), **split(2)).causes()["between tensor ranks"] == sent
    # a replica's computing hides all but a tenth
    exposed = 0.1 * weights * 6 * 63 / 64 / (8 * EXPECTED.network)
    assert at(EXPECTED).causes()["between replicas"] == pytest.approx(exposed)


@pytest.mark.parametrize(
    ("stage", "recompute", "reductions", "gathers"),
    [(1, "none", 1, 1), (2, "none", 128, 1), (3, "none", 128, 256), (3, "layers", 128, 384)],
)
def test_zero_reduces_and_gathers_fp32(stage, recompute, reductions, gathers):
    """128 microbatches of 8 GPUs; stage 3 gathers before each forward and each backward pass."""
    weights = LAYERS * LAYER + 2 * V * H
    links = FREE._replace(hidden=0, link=300e9)
    zero = {"engine": "deepspeed", "zero": ZeroConfig(stage=stage), "recompute": recompute}
    once = weights * 4 * 7 / 8 / 300e9
    assert at(links, 8, **zero).seconds == pytest.approx((reductions + gathers) * once)


def test_a_pipeline_waits_for_its_last_stage_and_fills_and_drains():
    """64 GPUs in two stages: 32 microbatches and one more, each as long as the slower stage."""
    two = at(FREE._replace(products=1), **split(pipeline=2))
    last = 6 * S * (LAYERS / 2 * LAYER + V * H) / H100.peak_flops
    assert two.seconds == pytest.approx(33 * last)
    bound = at(FREE._replace(network=50e9), **split(pipeline=2))
    assert bound.causes()["between stages"] == pytest.approx(32 * 2 * S * H * 2 / 50e9)
    recomputed = at(FREE._replace(products=1), recompute="layers").causes()
    assert recomputed["recomputed"] == pytest.approx(recomputed["matrix products"] / 3)


# Measured --------------------------------------------------------------------


# The kernels that were measured: torch, compiled, read logits twice and wrote their gradient, in
# chunks of 2,048 tokens; gradients of norms took two passes, of queries and keys three; those of
# weights were rounded.
THEN = Kernels(
    *(28, 7, 15, 8, 26),
    *(6, 41, 2048),
    adds=False,
    weight=10,
    head=28,
    embedding=20,
)


@pytest.mark.parametrize(
    ("model", "micro", "kind", "measured"),
    [
        (OLMO2_190M, 4, "h100", 0.248),
        (OLMO2_190M, 4, "h200", 0.236),
        (OLMO2_1B, 2, "h100", 0.579),
        (OLMO2_1B, 2, "h200", 0.554),
    ],
)
def test_a_step_takes_what_was_measured(model, micro, kind, measured):
    """The four of docs/guides/one-gpu.md, of which `Rates` has two figures."""
    settings = {"model": model, "micro_batch_size": micro, "batch_size": 4 * micro}
    with mock.patch.dict(KERNELS, {arrangement_of("megatron", model): THEN}):
        expected, fast, slow = (
            at(rates, 1, GPUS[kind], **settings).seconds for rates in (EXPECTED, FAST, SLOW)
        )
    assert expected == pytest.approx(measured, rel=0.03)
    assert fast < measured < slow


def test_the_range_of_the_7b_holds_what_olmo_core_reports():
    """47 to 48% with its own engine on H100s."""
    fast, expected, slow = (at(rates).mfu for rates in (FAST, EXPECTED, SLOW))
    assert slow < 0.48 < expected < fast < 0.7
