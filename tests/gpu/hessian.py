"""Hessian-vector products on a GPU: against the CPU's, and against `curvature hutchinson
--dry-run`.
"""

import re
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from base.ranks import Ranks
from curvature.cost.plan import Plan, estimate
from curvature.fused.one_pass import observed
from curvature.products.exact import DualHessian, HessianProduct
from curvature.products.model import CurvedModel
from curvature.products.parameters import Probe
from curvature.settings import HutchinsonSettings
from tests.gpu.figures import Figure
from tests.gpu.place import Place, random_tokens
from train.model.config import ModelConfig
from train.model.families import hf_settings

ROUNDS = 3


def random_model(model: ModelConfig, length: int, device: torch.device) -> Any:
    """In fp32, made where it is."""
    config = AutoConfig.for_model(model.family, **hf_settings(model, length, 0))
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()


def cpu_and_gpu(place: Place) -> list[Figure]:
    """The same product on both."""
    model, length = place.sizes.compared, place.sizes.compared_length
    tokens_BS1 = random_tokens(2, length + 1, model.vocab_size)
    network = random_model(model, length, torch.device("cpu"))
    products: list[HessianProduct] = []
    for device in (torch.device("cpu"), place.torch_device):
        curved = CurvedModel(network.to(device), ranks=Ranks(0, 1, device))
        hessian = DualHessian(curved)
        products.append(hessian.product(tokens_BS1, hessian.parameters.probe(Probe(0, 0))))
        with observed(lambda function, arguments: function(*arguments)):
            line_by_line = hessian.product(tokens_BS1, hessian.parameters.probe(Probe(0, 0)))
        network = random_model(model, length, torch.device("cpu"))
    here, there = (product.hv_p.cpu().double() for product in products)
    return [
        Figure(
            "Hv in fp32, CPU against GPU",
            float((there - here).norm() / here.norm()),
            "relative",
            most=1e-4,
        ),
        Figure(
            "Hv in fp32, functions compiled against line by line",
            float((line_by_line.hv_p.cpu().double() - there).norm() / there.norm()),
            "relative",
            most=1e-5,
        ),
        Figure(
            "loss beside it",
            abs(products[1].loss / products[0].loss - 1),
            "relative difference",
            most=1e-5,
        ),
        Figure(
            "g.v beside it",
            abs(products[1].slope - products[0].slope),
            "nats/token, difference",
            most=1e-2,
        ),
    ]


def vectors_on_the_host(place: Place) -> list[Figure]:
    """A product of two batches with its vectors on the host, which pass through a pinned buffer."""
    model, length = place.sizes.compared, place.sizes.compared_length
    batches_BS1 = random_tokens(3, length + 1, model.vocab_size).split(2)
    device = place.torch_device
    results = []
    for vectors in (device, torch.device("cpu")):
        network = random_model(model, length, torch.device("cpu")).to(device)
        hessian = DualHessian(CurvedModel(network, ranks=Ranks(0, 1, device), vectors=vectors))
        v_p = hessian.parameters.probe(Probe(0, 0))
        results.append(hessian.mean_product(batches_BS1, v_p).hv_p.cpu().double())
    on_device, on_host = results
    return [
        Figure(
            "Hv of two batches, vectors on the host against the GPU",
            float((on_host - on_device).norm() / on_device.norm()),
            "relative",
            most=1e-5,  # gradients of embeddings are summed by atomics, in any order
        )
    ]


def seconds(place: Place) -> list[Figure]:
    """A product of one sequence in bf16 at the largest shape that is timed, against the
    estimate.
    """
    name, (model, _) = list(place.sizes.timed.items())[-1]
    length, device = place.sizes.timed_length, place.torch_device
    network = random_model(model, length, device)
    settings = HutchinsonSettings(
        dtype="bf16",
        microbatch_sequences=1,
        sequence_length=length,
        lambda_max=False,
        device=place.device,  # type: ignore[arg-type]
    )
    kind = (
        re.search(r"A100|H100|H200", torch.cuda.get_device_name())
        if place.device == "cuda"
        else None
    )
    gpu = kind[0].lower() if kind else "h200"
    cost = estimate(network.config, settings, Plan(1, gpu))
    hessian = DualHessian(CurvedModel(network, ranks=Ranks(0, 1, device), dtype=torch.bfloat16))
    tokens_BS1 = random_tokens(1, length + 1, model.vocab_size)
    hessian.probed(tokens_BS1, Probe(0, 0))
    place.synchronize()
    began_at = time.perf_counter()
    for index in range(ROUNDS):
        hessian.probed(tokens_BS1, Probe(0, 1 + index))  # returns numbers: it waits for the GPU
    each = (time.perf_counter() - began_at) / ROUNDS
    what = f"Hessian product, {name}, 1 x {length} tokens in bf16"
    figures = [Figure(what, each, "s", note=f"estimated for {gpu}: {cost.product_seconds:.3g} s")]
    if memory := place.peak_memory():
        planned = sum(cost.memory.values())
        figures += [
            Figure(
                f"{what}: over the estimate", each / cost.product_seconds, "", least=0.5, most=2.0
            ),
            Figure(
                f"{what}: peak memory over the estimate", memory / planned, "", least=0.5, most=1.0
            ),
        ]
    return figures
