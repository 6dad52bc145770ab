"""Single kernels in bf16: norm, rotary embedding, attention, sums over tokens, loss; NCCL, one rank."""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.gpu.figures import CheckedFigure, relative_error
from tests.gpu.workbench import Workbench
from train.model import losses
from train.model.accumulation import add_product, embedded
from train.model.chunks import LOSS_CHUNK_TOKENS
from train.model.documents import attention_in_documents, document_bounds
from train.model.elementwise import normed, normed_and_rotated
from train.model.losses import Targets

ROPE_BASE = 500_000.0
HEAD = 128


def rope(workbench: Workbench) -> list[CheckedFigure]:
    """Norm and rotary embedding of bf16 queries, compiled as in training, against float64."""
    length, device = workbench.sizes.timed_length, workbench.torch_device
    generator = torch.Generator().manual_seed(0)
    query_SBNE = torch.randn(length, 1, 4, HEAD, generator=generator).bfloat16()
    weight_W = torch.ones(4 * HEAD, dtype=torch.bfloat16)
    inverse_E2 = ROPE_BASE ** (-torch.arange(0, HEAD, 2).double() / HEAD)
    angles_SE = torch.outer(torch.arange(length).double(), inverse_E2).repeat(1, 2)[:, None, None]
    squares_SB11 = query_SBNE.double().square().mean((2, 3), keepdim=True)
    normed_SBNE = query_SBNE.double() / (squares_SB11 + 1e-6).sqrt()
    first, second = normed_SBNE.chunk(2, -1)
    exact = normed_SBNE * angles_SE.cos() + torch.cat((-second, first), -1) * angles_SE.sin()
    query, weight = query_SBNE.to(device), weight_W.to(device)
    turned, _ = normed_and_rotated(
        query, query, weight, weight, rotary_base=ROPE_BASE, eps=1e-6, group=None
    )
    name, error = (
        "norm and rotary embedding in bf16, as it is trained",
        relative_error(turned, exact),
    )
    note = "rounding once leaves 1.64e-3"
    return [CheckedFigure(name, error, "relative error", most=1.7e-3, note=note)]


def norms(workbench: Workbench) -> list[CheckedFigure]:
    """Gradients of a norm in bf16, compiled as in training, against float64."""
    length, device = workbench.sizes.timed_length, workbench.torch_device
    generator = torch.Generator().manual_seed(0)
    x_SBH, by_output_SBH = (
        (torch.randn(length, 4, 768, generator=generator) + 0.3).bfloat16() for _ in range(2)
    )
    gradients = []
    for dtype, where in ((torch.bfloat16, device), (torch.float64, torch.device("cpu"))):
        x = x_SBH.detach().to(where, dtype).requires_grad_()
        weight = torch.full((768,), 1.5, dtype=dtype, device=where, requires_grad=True)
        weight.grad_dtype = None  # as in training
        compute = normed if dtype == torch.bfloat16 else _plain_norm
        compute(x, weight, 1e-6).backward(by_output_SBH.to(where, dtype))
        assert x.grad is not None
        assert weight.grad is not None
        gradients.append((x.grad, weight.grad))
    by_x, by_weight = (relative_error(*pair) for pair in zip(*gradients, strict=True))
    what, note = "gradient of a norm in bf16, as it is trained", "rounding once leaves 1.65e-3"
    return [
        CheckedFigure(f"{what}, by its input", by_x, "relative error", most=2e-3, note=note),
        CheckedFigure(f"{what}, by its weight", by_weight, "relative error", most=1e-5),
    ]


def _plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def documents(workbench: Workbench) -> list[CheckedFigure]:
    """Attention inside documents of 1 to hundreds of tokens in bf16, and its gradients, against
    fp32 document after document; a part of the heads shares keys.
    """
    length, device = workbench.sizes.timed_length, workbench.torch_device
    generator = torch.Generator().manual_seed(0)
    starts_BS = torch.rand(2, length, generator=generator) < 0.01
    starts_BS[:, 0] = True
    bounds = document_bounds(starts_BS)
    longest = int(bounds.diff().max())
    drawn = [torch.randn(length, 2, heads, HEAD, generator=generator) for heads in (4, 2, 2)]
    outcomes = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [x.bfloat16().to(device, dtype).requires_grad_() for x in drawn]
        output = attention_in_documents(inputs[0], inputs[1], inputs[2], bounds.to(device), longest)
        output.float().square().sum().backward()
        outcomes.append([output.detach(), *(x.grad for x in inputs if x.grad is not None)])
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    errors = map(relative_error, *outcomes)
    what = "attention inside documents in bf16"
    return [
        CheckedFigure(f"{what}, {name}", error, "relative error", most=1e-2)
        for name, error in zip(names, errors, strict=True)
    ]


def sums(workbench: Workbench) -> list[CheckedFigure]:
    """Sums over 16,384 tokens in bf16, which are kept in fp32, against float64."""
    device, generator = workbench.torch_device, torch.Generator().manual_seed(0)
    ids_N = torch.randint(64, (1 << 14,), generator=generator)
    left_NA, right_NB = (
        (torch.randn(1 << 14, 256, generator=generator) + 0.3).bfloat16() for _ in range(2)
    )
    table_VB = torch.zeros(64, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    embedded(ids_N.to(device), table_VB).backward(right_NB.to(device))
    assert table_VB.grad is not None
    total_AB = torch.zeros(256, 256, device=device)
    for chunk in range(0, 1 << 14, 2048):
        rows = slice(chunk, chunk + 2048)
        add_product(total_AB, left_NA[rows].to(device), right_NB[rows].to(device))
    of_tokens = torch.zeros(64, 256).double().index_add_(0, ids_N, right_NB.double())
    product = left_NA.double().T @ right_NB.double()
    errors = (relative_error(table_VB.grad, of_tokens), relative_error(total_AB, product))
    names = ("gradient of an embedding in bf16", "products of bf16 chunks, summed in fp32")
    note, unit = "rounding once leaves 1.7e-3", "relative error"
    return [
        CheckedFigure(names[0], errors[0], unit, most=2e-3, note=note),
        CheckedFigure(names[1], errors[1], unit, most=1e-5),
    ]


def cross_entropy(workbench: Workbench) -> list[CheckedFigure]:
    """The loss's pass over the logits of a chunk in bf16, as it is trained: against fp64, and
    against the same written in torch and compiled.
    """
    device, rows = workbench.torch_device, workbench.sizes.saved.vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = LOSS_CHUNK_TOKENS if workbench.device == "cuda" else 64
    logits_CV = torch.randn(tokens, rows, generator=generator).mul_(3).bfloat16().to(device)
    labels_C = torch.randint(rows, (tokens,), generator=generator)
    counted_C = torch.rand(tokens, generator=generator) > 0.1
    chunk = Targets(labels_C.to(device), counted_C.to(device), 1e-3)
    trained, compiled = losses.pass_over(logits_CV), losses._line_by_line
    if logits_CV.is_cuda:
        compiled = torch.compile(compiled)

    # Some tokens in fp64.
    some = Targets(labels_C[:64], counted_C[:64], 1e-3)
    exact_CV = logits_CV[:64].cpu().double().requires_grad_()
    log_z_C = exact_CV.logsumexp(-1)
    of_tokens_C = F.cross_entropy(exact_CV, some.labels_T, reduction="none")
    of_tokens_C = of_tokens_C + some.z_loss * log_z_C.square()
    (of_tokens_C[some.counted_T].sum() / tokens).backward()
    assert exact_CV.grad is not None
    statistics_2C, by_logits_CV = trained(logits_CV.clone(), chunk, tokens, None, True)
    assert by_logits_CV is not None
    what, note = "loss of a chunk in bf16", "rounding once leaves 1.7e-3"
    gradient = relative_error(by_logits_CV[:64], exact_CV.grad)
    figures = [
        CheckedFigure(
            f"{what}: logsumexp",
            relative_error(statistics_2C[0, :64], log_z_C),
            "relative error",
            most=1e-6,
        ),
        CheckedFigure(f"{what}: gradient", gradient, "relative error", most=2e-3, note=note),
    ]

    # A pass writes over its input: what it computes with does not change its time.
    seconds = {}
    for name, function in (("kernel", trained), ("compiled", compiled)):
        for index in range(12):
            if index == 2:  # it is compiled and warm
                workbench.synchronize()
                began_at = time.perf_counter()
            function(logits_CV, chunk, tokens, None, True)
        workbench.synchronize()
        seconds[name] = (time.perf_counter() - began_at) / 10
    moved = 4 * logits_CV.numel() / seconds["kernel"]
    shape = f"{what}, {tokens} x {rows}"
    ratio = seconds["kernel"] / seconds["compiled"]
    return [
        *figures,
        CheckedFigure(f"{shape}: kernel", seconds["kernel"], "s"),
        CheckedFigure(f"{shape}: a read and a write of the logits", moved, "bytes/s"),
        CheckedFigure(f"{shape}: over torch, compiled", ratio, note="4 bytes a logit over 6"),
    ]


def nccl(workbench: Workbench) -> list[CheckedFigure]:
    """NCCL starts, sums over its one rank, and the control group beside it answers."""
    from train.distributed import from_rank_zero, largest, start

    os.environ.setdefault("NCCL_DEBUG", "WARN")
    began_at = time.perf_counter()
    device = start()
    values = torch.ones(workbench.sizes.megabytes << 18, device=device)
    dist.all_reduce(values)
    workbench.synchronize()
    started = time.perf_counter() - began_at
    wrong = float((values != 1).sum())
    began_at = time.perf_counter()
    dist.all_reduce(values)
    workbench.synchronize()
    seconds = time.perf_counter() - began_at
    agreed = float(from_rank_zero("here") == "here" and largest([1.0, 2.0]) == [1.0, 2.0])
    what = f"{dist.get_backend()}, one rank"
    dist.destroy_process_group()
    return [
        CheckedFigure(f"{what}: wrong entries of a sum", wrong, "", most=0.0),
        CheckedFigure(f"{what}: control group", agreed, "1 is right", least=1.0),
        CheckedFigure(f"{what}: start and first sum", started, "s", most=60.0),
        CheckedFigure(f"{what}: sum of {workbench.sizes.megabytes} MB", seconds, "s"),
    ]
