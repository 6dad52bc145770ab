"""A block and a layer to learn on, and the error of transforms by the modules that are measured."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quant_eval.casts.activations import activation_cast
from quant_eval.casts.linear import CastLinear
from quant_eval.model.streamed import Block, StreamedModel
from quant_eval.quantizer import GridSpec
from quant_eval.rounding.grid import round_to_nearest
from quant_eval.transforms.hadamard import hadamard_steps
from quant_eval.transforms.steps import Transform
from tests.quant_eval.models import make_model, open_model
from train.model.families import SITES

LENGTH = 12


def make_block(directory, name="olmo2", **changes) -> tuple[StreamedModel, Block]:
    make_model(directory, name, num_hidden_layers=1, **changes)
    model = open_model(directory)
    return model, model.block(0)


def inputs_with_outliers(sequences: int, width: int) -> Tensor:
    x = torch.randn(sequences, LENGTH, width, generator=torch.Generator().manual_seed(1))
    x[..., 7] *= 30
    x[..., 20] *= 20
    return x


class Layer:
    """The layer of issue 19's table, as a block of one site: two outlier features of 256."""

    prefix = "layer"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def copy(self) -> "Layer":
        return Layer(nn.Sequential(self.module[0]))  # type: ignore[index]

    def linears(self) -> list[dict[str, nn.Linear]]:
        return [{"layer.0": self.module[0]}]  # type: ignore[index]

    def __call__(self, x: Tensor, context: dict[str, Any]) -> Tensor:
        y: Tensor = self.module(x)
        return y


def planted_layer(tokens: int) -> tuple[Any, Tensor, Tensor]:
    """A layer, tokens to learn on, and as many others."""
    generator = torch.Generator().manual_seed(0)
    mix_II = torch.randn(256, 256, generator=generator) / 16
    x = torch.randn(2 * tokens, 256, generator=generator) @ mix_II
    x[:, 7] *= 30
    x[:, 100] *= 20
    linear = nn.Linear(256, 128, bias=False).requires_grad_(False)
    linear.weight.copy_(0.02 * torch.randn(128, 256, generator=generator))
    linear.weight[:, 5] *= 6
    return Layer(nn.Sequential(linear)), x[None, :tokens], x[None, tokens:]


def hadamard_start(block: Block, seed: int = 0) -> dict[str, Transform]:
    widths = [next(iter(linears.values())).in_features for linears in block.linears()]
    return {
        site: Transform(*hadamard_steps(width, seed=(seed, number)))
        for number, (site, width) in enumerate(zip(SITES, widths, strict=False))
    }


@torch.no_grad()
def replaced(block: Block, transforms: Mapping[str, Transform], spec: GridSpec | None) -> Block:
    """The block with cast linears; without a spec nothing is rounded or cast."""
    copied = block.copy()
    for linears, transform in zip(block.linears(), transforms.values(), strict=True):
        stacked_OI = transform.weight(torch.cat([each.weight for each in linears.values()]))
        if spec and spec.method != "none":
            stacked_OI = round_to_nearest(stacked_OI, spec).dense()
        parts = stacked_OI.split([each.out_features for each in linears.values()])
        for (name, linear), part_OI in zip(linears.items(), parts, strict=True):
            cast = spec and activation_cast(spec, linear.in_features)
            cast_linear = CastLinear(part_OI, linear.bias, transform, cast or nn.Identity())
            copied.module.set_submodule(name.removeprefix(f"{block.prefix}."), cast_linear)
    return copied


@torch.no_grad()
def output_error(block, transforms, spec, batches, context) -> float:
    """The sum of squared errors over that of squared outputs, in float64."""
    quantized, wrong, whole = replaced(block, transforms, spec), 0.0, 0.0
    for x in batches:
        expected = block(x, context).double()
        wrong += float((quantized(x, context).double() - expected).square().sum())
        whole += float(expected.square().sum())
    return wrong / whole
