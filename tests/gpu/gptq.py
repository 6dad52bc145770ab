"""GPTQ: codes and losses of the GPU against the CPU's, and seconds per decoder block."""

import time
from pathlib import Path
from typing import Literal
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from base.hessian import InputHessian
from base.ranks import Ranks
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import DTYPES
from quant_eval.cost import Shape, block_seconds
from quant_eval.group import Rounded
from quant_eval.measuring.losses import EvaluationSet, PairedLosses
from quant_eval.measuring.walk import Variant, walk
from quant_eval.model.streamed import StreamedModel
from quant_eval.rounding.gptq import gptq, prepare, round_columns
from quant_eval.settings import ComputeSettings
from quant_eval.specs import parse_spec
from quant_eval.transforms.steps import Transform
from tests.gpu.figures import CheckedFigure
from tests.gpu.workbench import Workbench, hf_model, random_tokens
from tests.quant_eval.specs import gptq_spec
from train.planning.flops import GPUS

SPEC = "gptq-b4-g32"


def walked(
    model: Path, calibration_NL: Tensor, data: EvaluationSet, device: torch.device
) -> tuple[dict[str, Tensor], PairedLosses]:
    """Codes by weight, and losses, of the walk through a model in fp32."""
    codes: dict[str, Tensor] = {}

    def keep(name: str, rounded: Rounded, _: Transform) -> None:
        codes[name] = rounded.codes_OI

    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    compute = ComputeSettings(batch_size=8, device=kind)
    streamed = StreamedModel(model, HFWeights(model), DTYPES["fp32"], device)
    variant = Variant(parse_spec(SPEC), calibration_NL, keep=keep)
    (quantized,) = walk(streamed, [variant], data, compute, Ranks(0, 1, device))
    assert quantized.losses
    return codes, quantized.losses


def graph_and_plain(workbench: Workbench) -> list[CheckedFigure]:
    """The columns of one linear as a CUDA graph and kernel by kernel: equal codes, seconds."""
    width, device = workbench.sizes.block.hidden_size, workbench.torch_device
    generator = torch.Generator().manual_seed(0)
    inputs_NI, weight_OI = (torch.randn(2 * width, width, generator=generator) for _ in range(2))
    hessian = InputHessian(width, device, torch.float32)
    hessian.add(inputs_NI.to(device))
    spec = gptq_spec(SPEC)
    prepared, weight_OI = prepare(hessian.mean("linear"), spec, "linear"), weight_OI.to(device)

    def codes_and_seconds() -> tuple[Tensor, float]:
        for _ in range(2):  # the first makes the graph
            workbench.synchronize()
            began_at = time.perf_counter()
            codes_OI = gptq(weight_OI, prepared, spec).codes_OI
            workbench.synchronize()
        return codes_OI, time.perf_counter() - began_at

    graph_OI, graph_seconds = codes_and_seconds()
    with mock.patch("quant_eval.rounding.gptq.block_rounding", return_value=round_columns):
        plain_OI, plain_seconds = codes_and_seconds()
    each = 1e6 * graph_seconds / width
    note = f"{each:.3g} us a column; expected 13 to 20 on an H100"
    equal = float((graph_OI == plain_OI).double().mean())
    name = "GPTQ, columns as a CUDA graph: codes of the plain kernels"
    ratio = plain_seconds / graph_seconds
    return [
        CheckedFigure(name, equal, "of all", least=1.0),
        CheckedFigure("GPTQ, plain columns over the graph's", ratio, "x", note=note),
    ]


def bf16_hessian(workbench: Workbench) -> list[CheckedFigure]:
    """The sums of bf16 products on tensor cores against float64."""
    width = workbench.sizes.block.hidden_size
    generator = torch.Generator().manual_seed(0)
    inputs_NI = torch.randn(4096, width, generator=generator).add(0.3).bfloat16()
    inputs_NI = inputs_NI.to(workbench.torch_device)
    hessian = InputHessian(width, workbench.torch_device, torch.bfloat16)
    hessian.add(inputs_NI)
    exact_II = inputs_NI.double().T @ inputs_NI.double() / len(inputs_NI)
    size_I = exact_II.diagonal().sqrt()
    error = (hessian.mean("linear") - exact_II).abs() / (size_I[:, None] * size_I)
    note = "2.5e-6 on an H200: tensor cores cut off what they add up in fp32"
    name = "Hessian of bf16 inputs against float64"
    return [CheckedFigure(name, float(error.max()), most=1e-5, note=note)]


def evaluation(vocabulary: int, length: int) -> EvaluationSet:
    """Four random documents."""
    rows = random_tokens(4, length, vocabulary).numpy()
    documents = [np.ascontiguousarray(row) for row in rows]
    return EvaluationSet(documents, list(range(4)), list(range(4)), 0)


def cpu_and_gpu(workbench: Workbench) -> list[CheckedFigure]:
    """The same quantization on both."""
    model, length = workbench.sizes.compared, workbench.sizes.compared_length
    directory = hf_model(workbench.work / "model", model, length)
    calibration_NL = random_tokens(48, length, model.vocab_size)
    data = evaluation(model.vocab_size, length)
    devices = (torch.device("cpu"), workbench.torch_device)
    here, there = (walked(directory, calibration_NL, data, device) for device in devices)
    codes, codes_there = here[0], there[0]
    equal = sum(int((codes[name] == codes_there[name]).sum()) for name in codes)
    total = sum(codes_OI.numel() for codes_OI in codes.values())
    kl = [float(losses.kl.sum() / losses.tokens.sum()) for _, losses in (here, there)]
    nll = [float(losses.nll.sum() / losses.tokens.sum()) for _, losses in (here, there)]
    name, unit = "GPTQ, CPU against GPU", "relative difference"
    return [
        CheckedFigure(f"{name}: equal codes", equal / total, "of all", least=0.999),
        CheckedFigure(f"{name}: loss", abs(nll[1] / nll[0] - 1), unit, most=1e-5),
        CheckedFigure(f"{name}: KL divergence", abs(kl[1] / kl[0] - 1), unit, most=1e-2),
    ]


def seconds_of_block(workbench: Workbench) -> list[CheckedFigure]:
    """Seconds of a block of the 1B shape, second run of two: the first loads kernels."""
    model = workbench.sizes.block
    sequences, length = workbench.sizes.calibration
    directory = hf_model(workbench.work / "model", model, length)
    calibration_NL = random_tokens(sequences, length, model.vocab_size)
    data = evaluation(model.vocab_size, length)
    few = calibration_NL[: max(1, sequences // 16)]
    walked(directory, few, data, workbench.torch_device)
    began_at = time.perf_counter()
    walked(directory, calibration_NL, data, workbench.torch_device)
    each = (time.perf_counter() - began_at) / model.num_hidden_layers
    config = AutoConfig.from_pretrained(directory)
    expected = block_seconds(Shape.of(config), sequences * length, GPUS["h100"], "fp32")
    note = (
        f"roofline {expected:.2g} s: Hessians in fp64 at 45 TFLOP/s, forward passes in fp32 at 50,"
        " 16 us a column; without host copies; the embedding and the evaluation are"
        " counted as the blocks'"
    )
    most = 4 * expected if workbench.device == "cuda" else None
    name = f"GPTQ, block of width {model.hidden_size}, {sequences} x {length} tokens"
    return [CheckedFigure(name, each, "s", most=most, note=note)]
