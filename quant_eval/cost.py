"""The seconds that quantizing and measuring a model take on a GPU, before a weight is read.

A roofline, as that of training: matrix products at a share of the peak. Of GPTQ it is held against
what an H200 and an H100 took for a block of OLMo2-1B (docs/guides/one-gpu.md); nothing else of it
was measured. Reading weights from the disk and starting processes are not counted here.
"""

import math
from typing import NamedTuple

from transformers import PretrainedConfig

from ckpt_tools.hf.forward import empty_model
from quant_eval.quantizer import QuantSpec
from train.model.families import LAYERS, family_of
from train.planning.flops import GpuKind

# Shares of the peak. Products in fp64 of tensor cores have the peak that fp32 has without them.
BF16_SHARE, FP32_SHARE, FP64_SHARE = 0.5, 0.75, 0.67
HESSIAN_SHARE = 9 / 16  # of the products of all pairs of inputs: the matrix is symmetric
COLUMN_SECONDS = 16e-6  # of a column's six kernels within a CUDA graph
# What an H200 and an H100 took over this roofline: 1.8 and 2.1 s a block, where it has 1.47.
MEASURED_SHARE = 1.3
LEARNING_PASSES = 3  # forward and backward of a step of what is learned, in forward passes
BATCHES = {"autoround": 8}  # sequences of such a step, where it is not all of them
# AWQ tries 20 scales for each of four groups of linears (arXiv 2306.00978, section 4), a part of
# the block each: as many passes as half of them through whole blocks.
SEARCHED = {"awq": 40}  # passes of methods that try values, beside those that all take


class Shape(NamedTuple):
    """The sizes of a model that decide the cost.

    Attributes:
        layers: decoder blocks.
        weights: of the linears of a block.
        inputs: width of what the linears read at each place of a block.
        attention: width of all query heads.
        head: weights of the output layer.
    """

    layers: int
    weights: int
    inputs: tuple[int, ...]
    attention: int
    head: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Shape":
        """Return the sizes of a model, of which its configuration is enough."""
        row = family_of(config)
        model = empty_model(config)
        block = getattr(model.get_submodule(row.decoder), LAYERS)[0]
        attention, mlp = row.attention, row.mlp
        places = (
            [f"{attention}.{name}" for name in row.reading],
            [f"{attention}.{row.writing}"],
            [f"{mlp}.{name}" for name in row.mlp_reading],
            [f"{mlp}.{row.mlp_writing}"],
        )
        shapes = [[block.get_submodule(name).weight.shape for name in names] for names in places]
        return cls(
            layers=config.num_hidden_layers,
            weights=sum(math.prod(shape) for place in shapes for shape in place),
            inputs=tuple(place[0][1] for place in shapes),
            attention=shapes[1][0][1],
            head=config.vocab_size * config.hidden_size,
        )


def product_seconds(flops: float, gpu: GpuKind, dtype: str) -> float:
    """Return the seconds of so many operations in a forward pass of bf16 or fp32."""
    if dtype == "bf16":
        return flops / (BF16_SHARE * gpu.peak_flops)
    return flops / (FP32_SHARE * gpu.fp32_flops)


def forward_seconds(shape: Shape, tokens: int, length: int, gpu: GpuKind, dtype: str) -> float:
    """Return the seconds of a forward pass over tokens in sequences of a length."""
    # Each token attends to half of the sequence, in two products.
    attention = 2 * shape.layers * shape.attention * length
    flops = tokens * (2 * (shape.layers * shape.weights + shape.head) + attention)
    return product_seconds(flops, gpu, dtype)


def quantizing_seconds(
    shape: Shape, spec: QuantSpec, sequences: int, length: int, gpu: GpuKind, dtype: str
) -> float:
    """Return the seconds of quantizing a model once, on so many sequences of calibration.

    Methods of other projects are taken to do the work of ours. A spec that reads no text rounds in
    no time.
    """
    if not spec.needs_calibration:
        return 0.0
    searching = SEARCHED.get(spec.method, 0) * sequences
    batch = min(sequences, BATCHES.get(spec.method, sequences))
    learning = LEARNING_PASSES * (spec.iterations or 0) * batch
    passed = (searching + learning) * length
    more = product_seconds(2 * passed * shape.weights, gpu, dtype)
    block = MEASURED_SHARE * block_seconds(shape, sequences * length, gpu, dtype)
    return shape.layers * (block + more)


def block_seconds(shape: Shape, tokens: int, gpu: GpuKind, dtype: str) -> float:
    """Return the least seconds of a block by GPTQ, reading and copying aside."""
    hessians = sum(HESSIAN_SHARE * 2 * tokens * width**2 for width in shape.inputs)
    # Cholesky a third, the inverse a third, errors of the rows the rest.
    factors = sum(width**3 for width in shape.inputs)
    columns = sum(shape.inputs) * COLUMN_SECONDS
    forward = product_seconds(2 * tokens * shape.weights, gpu, dtype)
    return (hessians + factors) / (FP64_SHARE * gpu.fp32_flops) + forward + columns
