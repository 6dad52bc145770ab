"""The roofline of a step against sums worked by hand."""

from dataclasses import replace
from math import inf

import pytest

from tests.bench import roofline
from train.planning.flops import GPUS, Gpu, flops_per_token
from train.planning.speed import EXPECTED, PESSIMISTIC, Rates, Roofline
from train.run.config import RunConfig
from train.run.parallel import ParallelConfig

FREE = Rates(inf, inf, inf, inf, 0, 0, inf, 0, inf, 1, 1, 0)  # nothing takes time
H, F, V, LAYERS, S = 4096, 11_008, 100_352, 32, 4096  # of OLMo2-7B
LAYER = 4 * H * H + 3 * H * F


def run_of(tensor: int = 1, pipeline: int = 1, micro: int = 1) -> RunConfig:
    parallel = ParallelConfig(tensor=tensor, pipeline=pipeline, sequence=tensor > 1)
    return roofline.recipe_run().model_copy(
        update={"parallel": parallel, "micro_batch_size": micro}
    )


def at(rates: Rates, gpus: int = 64, gpu: Gpu = GPUS["h100"], **layout: int) -> Roofline:
    return Roofline(run_of(**layout), gpus, 8, gpu, rates)


@pytest.mark.parametrize("layout", [{}, {"micro": 4}, {"tensor": 4}])
def test_flops_are_those_of_the_mfu(layout):
    """All GPUs at their peak: 6 FLOPs a weight and token but for norms, which are not products.

    Attention: 6 products over the whole square in the MFU, 7 over its half in fact.
    """
    peak = 64 * GPUS["h100"].peak_flops
    tokens = 1024 * S
    products = at(FREE._replace(products=1), **layout).seconds * peak / tokens
    attention = (
        at(FREE._replace(attention_forward=1, attention_backward=1), **layout).seconds
        * peak
        / tokens
    )
    assert products == pytest.approx(6 * (LAYERS * LAYER + V * H), rel=1e-9)
    norms = (4 * LAYERS + 1) * H
    flops = flops_per_token(run_of().model, S)
    assert products + attention * 12 / 7 + 6 * norms == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize("tensor", [1, 2])
def test_bytes_follow_from_shapes(tensor):
    """At a byte a second, one microbatch of 4,096 tokens on each of the tensor ranks."""
    gpu = GPUS["h100"]._replace(bandwidth=1)
    rates = FREE._replace(bandwidth=1, accumulated=0.5)
    roofline = at(rates, gpu=gpu, tensor=tensor)
    causes = roofline.microbatch(0)
    heads = 2 * H * (2 + 8)  # queries and keys: in and out, and what `elementwise` does in backward
    joined = 3 * H * 2
    swiglu = F * (2 + 1) + F * (3 + 2)
    norms = 2 * H * ((2 + 1) + (2 + 1) + 2)  # with residual; for inputs, for weights
    sums = 2 * H * (2 + 1)  # of the residual's two gradients
    bf16 = S * (heads + joined + swiglu + norms + sums)
    assert causes["other kernels"] * tensor == LAYERS * 2 * bf16
    assert causes["sums of gradients"] * tensor == LAYERS * LAYER * (2 + 4 + 4)
    assert causes["output layer and loss"] * tensor == V * H * 16 + S * V * (2 + 2 + 2)
    assert causes["embedding"] * tensor == V * H * (2 + 2 + 4 + 4)

    changed = {"kernels": "transformer_engine", "recompute": "selective"}
    causes = replace(roofline, run=roofline.run.model_copy(update=changed)).microbatch(0)
    assert causes["sums of gradients"] * tensor == LAYERS * LAYER * (4 + 4) / 2
    again = 2 * H * 2 + F * 3 + H * 3  # queries and keys, SwiGLU, the first norm
    assert causes["recomputed"] * tensor == LAYERS * 2 * S * again


def test_communication_by_closed_forms():
    """Bytes over bytes per second, nothing hidden; 7.3e9 parameters."""
    parameters = LAYERS * (LAYER + 4 * H) + 2 * V * H + H
    rates = FREE._replace(hidden=0, adapter=50e9, rings=0.5)
    # 64 replicas over 8 nodes: gradients in fp32, weights in bf16, at 8 adapters x 50 GB/s x 0.5
    expected = parameters * (4 + 2) * 63 / 64 / 200e9
    assert at(rates).seconds == pytest.approx(expected, rel=1e-9)
    # 8 in a node
    links = FREE._replace(hidden=0, link=300e9)
    assert at(links, 8).seconds == pytest.approx(parameters * 6 * 7 / 8 / 300e9, rel=1e-9)
    # tensor 2: 32 microbatches of 32 layers; in each 6 x half of 4,096 x 4,096 bf16
    sent = 32 * LAYERS * 6 * S * H * 2 / 2
    assert at(FREE._replace(link=1), tensor=2).causes()["between tensor ranks"] == sent
    # a replica's computing hides all but a tenth
    assert at(EXPECTED).causes()["between replicas"] == pytest.approx(
        0.1 * parameters * 6 * 63 / 64 / (8 * 46e9 * 0.55), rel=1e-9
    )


def test_a_pipeline_waits_for_its_last_stage_and_fills_and_drains():
    """64 GPUs in two stages: 32 microbatches and one more, each as long as the slower stage."""
    gpu = GPUS["h100"]
    two = at(FREE._replace(products=1), pipeline=2)
    last = 6 * S * (LAYERS / 2 * LAYER + V * H) / gpu.peak_flops
    assert two.seconds == pytest.approx(33 * last, rel=1e-9)
    bound = at(FREE._replace(adapter=50e9), pipeline=2)
    assert bound.causes()["between stages"] == pytest.approx(32 * 2 * S * H * 2 / 50e9, rel=1e-9)
    recomputed = at(FREE._replace(products=1)).run.model_copy(update={"recompute": "layers"})
    more = Roofline(recomputed, 64, 8, gpu, FREE._replace(products=1)).causes()
    assert more["recomputed"] == pytest.approx(more["matrix products"] / 3, rel=1e-9)


def test_half_of_the_peak_on_64_gpus():
    """The recipe in the planner's layout, and what the engine without fused kernels had."""
    assert roofline.planned("h100", EXPECTED).mfu > 0.5
    assert roofline.planned("h200", EXPECTED).mfu > 0.5
    assert roofline.planned("h100", PESSIMISTIC).mfu > 0.45
    assert 0.35 < roofline.before().mfu < 0.4
