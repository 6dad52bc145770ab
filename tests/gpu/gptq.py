"""GPTQ: codes and losses of the GPU against the CPU's, and seconds per decoder block."""

import time
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from base.ranks import Ranks
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import DTYPES
from quant_eval.grid import Rounded
from quant_eval.measuring.losses import EvaluationSet, PairedLosses
from quant_eval.measuring.walk import Variant, walk
from quant_eval.model.streamed import StreamedModel
from quant_eval.settings import ComputeSettings
from quant_eval.specs import parse_spec
from tests.gpu.figures import Figure
from tests.gpu.place import Place, hf_model, random_tokens
from train.model.config import ModelConfig

SPEC = "gptq-b4-g32"
FP64_FLOPS = (
    0.67 * 67e12
)  # an H100's or H200's tensor cores, of which large products reach about two thirds
FP32_FLOPS = 0.75 * 67e12
COLUMN_SECONDS = 65e-6  # of a column's launches, some 15 of them


class Walked(NamedTuple):
    """A quantization: codes by weight, losses, and its seconds."""

    codes: dict[str, Tensor]
    losses: PairedLosses
    seconds: float


def walked(
    model: Path,
    calibration_NL: Tensor,
    data: EvaluationSet,
    device: torch.device,
    *,
    batch_size: int,
) -> Walked:
    """The walk through a model in fp32."""
    codes: dict[str, Tensor] = {}

    def keep(name: str, rounded: Rounded) -> None:
        codes[name] = rounded.codes_OI

    place: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    compute = ComputeSettings(batch_size=batch_size, device=place)
    streamed = StreamedModel(model, HFWeights(model), DTYPES["fp32"], device)
    variant = Variant(parse_spec(SPEC), calibration_NL, keep=keep)
    began_at = time.perf_counter()
    (quantized,) = walk(streamed, [variant], data, compute, Ranks(0, 1, device))
    assert quantized.losses
    return Walked(codes, quantized.losses, time.perf_counter() - began_at)


def evaluation(vocabulary: int, length: int) -> EvaluationSet:
    """Four random documents."""
    rows = random_tokens(4, length, vocabulary).numpy()
    return EvaluationSet(
        [np.ascontiguousarray(row) for row in rows], list(range(4)), list(range(4)), 0
    )


def cpu_and_gpu(place: Place) -> list[Figure]:
    """The same quantization on both."""
    model, length = place.sizes.compared, place.sizes.compared_length
    directory = hf_model(place.work / "model", model, length)
    calibration_NL = random_tokens(48, length, model.vocab_size)
    data = evaluation(model.vocab_size, length)
    devices = (torch.device("cpu"), place.torch_device)
    here, there = (
        walked(directory, calibration_NL, data, device, batch_size=8) for device in devices
    )
    equal = sum(int((here.codes[name] == there.codes[name]).sum()) for name in here.codes)
    total = sum(codes.numel() for codes in here.codes.values())
    divergences = [float(one.losses.kl.sum() / one.losses.tokens.sum()) for one in (here, there)]
    full = [float(one.losses.nll.sum() / one.losses.tokens.sum()) for one in (here, there)]
    return [
        Figure("GPTQ, CPU against GPU: equal codes", equal / total, "of all", least=0.999),
        Figure(
            "GPTQ, CPU against GPU: loss",
            abs(full[1] / full[0] - 1),
            "relative difference",
            most=1e-5,
        ),
        Figure(
            "GPTQ, CPU against GPU: KL divergence",
            abs(divergences[1] / divergences[0] - 1),
            "relative difference",
            most=1e-2,
        ),
    ]


def block_seconds(place: Place) -> list[Figure]:
    """Seconds of a block of the 1B shape, second run of two: the first loads kernels."""
    model = place.sizes.block
    sequences, length = place.sizes.calibration
    directory = hf_model(place.work / "model", model, length)
    calibration_NL = random_tokens(sequences, length, model.vocab_size)
    data = evaluation(model.vocab_size, length)
    few = calibration_NL[: max(1, sequences // 16)]
    walked(directory, few, data, place.torch_device, batch_size=8)
    seconds = walked(directory, calibration_NL, data, place.torch_device, batch_size=8).seconds
    each = seconds / model.num_hidden_layers
    expected = roofline_seconds(model, sequences * length)
    note = (
        f"roofline {expected:.2g} s: Hessians in fp64 at 45 TFLOP/s, forward passes in fp32 at 50,"
        " 65 us of launches a column; without host copies; the embedding and the evaluation are"
        " counted as the blocks'"
    )
    most = 4 * expected if place.device == "cuda" else None
    name = f"GPTQ, block of width {model.hidden_size}, {sequences} x {length} tokens"
    return [Figure(name, each, "s", most=most, note=note)]


def roofline_seconds(model: ModelConfig, tokens: int) -> float:
    """What one block takes at least, reading and copying aside."""
    hidden, wide = model.hidden_size, model.intermediate_size
    inputs = (hidden, hidden, hidden, wide)  # of q, k and v; of o; of gate and up; of down
    hessians = sum(9 / 16 * 2 * tokens * width**2 for width in inputs)
    factors = sum(
        width**3 for width in inputs
    )  # Cholesky a third, the inverse a third, errors of the rows the rest
    attention, mlp = 4 * hidden**2, 3 * hidden * wide
    forward = 2 * tokens * (attention + 2 * mlp)  # gate and up run twice more than once
    return (hessians + factors) / FP64_FLOPS + forward / FP32_FLOPS + sum(inputs) * COLUMN_SECONDS
