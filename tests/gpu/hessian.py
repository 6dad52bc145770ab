"""Hessian products on a GPU against the CPU's and `curvature hutchinson --dry-run`."""

import re
import time

import torch

from base.ranks import Ranks
from curvature.cost.plan import GpuPlan, estimate
from curvature.dual.one_pass import observed
from curvature.products.exact import DualHessian, HessianProduct
from curvature.products.model import CurvedModel
from curvature.products.parameters import Probe
from curvature.settings import HutchinsonSettings
from tests.gpu.figures import CheckedFigure, relative_error
from tests.gpu.workbench import Workbench, random_model, random_tokens

ROUNDS = 3


def cpu_and_gpu(workbench: Workbench) -> list[CheckedFigure]:
    """The same product on both."""
    model, length = workbench.sizes.compared, workbench.sizes.compared_length
    tokens_BS1 = random_tokens(2, length + 1, model.vocab_size)
    network = random_model(model, length)
    products: list[HessianProduct] = []
    for device in (torch.device("cpu"), workbench.torch_device):
        curved = CurvedModel(network.to(device), ranks=Ranks(0, 1, device))
        hessian = DualHessian(curved)
        products.append(hessian.product(tokens_BS1, hessian.parameters.probe(Probe(0, 0))))
        with observed(lambda function, arguments: function(*arguments)):
            line_by_line = hessian.product(tokens_BS1, hessian.parameters.probe(Probe(0, 0)))
        network = random_model(model, length)
    here, there = products
    name = "Hv in fp32, functions compiled against line by line"
    plain = relative_error(line_by_line.hv_p, there.hv_p)
    moved, slope = relative_error(there.hv_p, here.hv_p), abs(there.slope - here.slope)
    loss = abs(there.loss / here.loss - 1)
    return [
        CheckedFigure("Hv in fp32, CPU against GPU", moved, "relative", most=1e-4),
        CheckedFigure(name, plain, "relative", most=1e-5),
        CheckedFigure("loss beside it", loss, "relative difference", most=1e-5),
        CheckedFigure("g.v beside it", slope, "nats/token, difference", most=1e-2),
    ]


def vectors_on_the_host(workbench: Workbench) -> list[CheckedFigure]:
    """A product of two batches with its vectors on the host, which pass through a pinned buffer."""
    model, length = workbench.sizes.compared, workbench.sizes.compared_length
    batches_BS1 = random_tokens(3, length + 1, model.vocab_size).split(2)
    device = workbench.torch_device
    results = []
    for vectors in (device, torch.device("cpu")):
        network = random_model(model, length).to(device)
        hessian = DualHessian(CurvedModel(network, ranks=Ranks(0, 1, device), vectors=vectors))
        v_p = hessian.parameters.probe(Probe(0, 0))
        results.append(hessian.mean_product(batches_BS1, v_p).hv_p)
    on_device, on_host = results
    name = "Hv of two batches, vectors on the host against the GPU"
    # gradients of embeddings are summed by atomics, in any order
    return [CheckedFigure(name, relative_error(on_host, on_device), "relative", most=1e-5)]


def seconds(workbench: Workbench) -> list[CheckedFigure]:
    """A product of one sequence in bf16 at the largest timed shape, against the estimate."""
    name, (model, _) = list(workbench.sizes.timed.items())[-1]
    length, device = workbench.sizes.timed_length, workbench.torch_device
    network = random_model(model, length, device)
    settings = HutchinsonSettings(
        dtype="bf16",
        microbatch_sequences=1,
        sequence_length=length,
        lambda_max=False,
        device=workbench.device,  # type: ignore[arg-type]
    )
    name_of_gpu = torch.cuda.get_device_name() if workbench.device == "cuda" else ""
    kind = re.search(r"A100|H100|H200", name_of_gpu)
    gpu = kind[0].lower() if kind else "h200"
    cost = estimate(network.config, settings, GpuPlan(1, gpu))
    hessian = DualHessian(CurvedModel(network, ranks=Ranks(0, 1, device), dtype=torch.bfloat16))
    tokens_BS1 = random_tokens(1, length + 1, model.vocab_size)
    hessian.probed(tokens_BS1, Probe(0, 0))
    workbench.synchronize()
    began_at = time.perf_counter()
    for index in range(ROUNDS):
        hessian.probed(tokens_BS1, Probe(0, 1 + index))  # returns numbers: it waits for the GPU
    each = (time.perf_counter() - began_at) / ROUNDS
    what = f"Hessian product, {name}, 1 x {length} tokens in bf16"
    figures = [
        CheckedFigure(what, each, "s", note=f"estimated for {gpu}: {cost.product_seconds:.3g} s")
    ]
    if memory := workbench.peak_memory():
        ratios = {
            f"{what}: over the estimate": (each / cost.product_seconds, 2.0),
            f"{what}: peak memory over the estimate": (memory / sum(cost.memory.values()), 1.0),
        }
        for title, (ratio, most) in ratios.items():
            figures.append(CheckedFigure(title, ratio, "", least=0.5, most=most))
    return figures
