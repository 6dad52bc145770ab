"""Casts: a linear, the KV cache and grids that are not integers, on the GPU against the CPU."""

import copy

import torch
from torch import Tensor, nn

from base.hessian import InputHessian
from ckpt_tools.formats.hf_weights import HFWeights
from quant_eval.casts.activations import activation_cast
from quant_eval.casts.attention import CacheCast, attach, cast_cache, watch_cache
from quant_eval.casts.linear import CastLinear
from quant_eval.model.streamed import Block, Context, StreamedModel
from quant_eval.quantizer import ColumnSpec, GridSpec
from quant_eval.rounding.gptq import gptq, prepare
from quant_eval.rounding.grid import round_to_nearest
from quant_eval.specs import parse_spec
from quant_eval.transforms.hadamard import hadamard_matrix, hadamard_steps
from quant_eval.transforms.placement import Places
from quant_eval.transforms.steps import Transform
from tests.gpu.figures import CheckedFigure, relative_error
from tests.gpu.workbench import Workbench, hf_model, random_tokens
from tests.quant_eval.specs import grid_spec

# Rotated inputs differ in their last bit, so of 100,000 numbers one or a few take the next of 16
# points, which is 0.4 of their standard deviation away.
MOST = 5e-3
GRIDS = ("fp8-a16", "mxfp4-a16", "nvfp4-a16", "ternary-g32")


def cast_linear(workbench: Workbench) -> list[CheckedFigure]:
    """4 bits of weights and of rotated inputs, token by token."""
    width, device = workbench.sizes.compared.hidden_size, workbench.torch_device
    generator = torch.Generator().manual_seed(0)
    weight_OI, tokens_NI = (torch.randn(2 * width, width, generator=generator) for _ in range(2))
    spec, rotation = grid_spec("w4a4-g32-had"), Transform(*hadamard_steps(width))
    cast = activation_cast(spec, width)
    assert cast
    rounded_OI = round_to_nearest(rotation.weight(weight_OI), spec).dense()
    here = CastLinear(rounded_OI, None, rotation, cast)
    there = copy.deepcopy(here).to(device)
    outputs_NO = here(tokens_NI)
    moved = relative_error(there(tokens_NI.to(device)).cpu(), outputs_NO)
    lost = relative_error(outputs_NO, tokens_NI @ weight_OI.T)
    return [
        CheckedFigure("W4A4 linear, CPU against GPU", moved, "of the output", most=MOST),
        CheckedFigure("W4A4 linear, error", lost, "of the output", least=1e-2, most=0.5),
    ]


@torch.no_grad()
def cache(workbench: Workbench) -> list[CheckedFigure]:
    """A block that casts nothing, bit for bit; one of 4 rotated bits, and one of FP8."""
    sizes = workbench.sizes.compared
    directory = hf_model(workbench.work / "model", sizes, workbench.sizes.compared_length)
    tokens_BL = random_tokens(4, workbench.sizes.compared_length, sizes.vocab_size)
    outputs: dict[str, list[Tensor]] = {}
    for device in (torch.device("cpu"), workbench.torch_device):
        model = StreamedModel(directory, HFWeights(directory), torch.float32, device)
        x_BLD = model.embedding()(tokens_BL.to(device))
        context = model.context(tokens_BL.shape[1])
        block = model.block(0)
        for name, changed in _cached(block, x_BLD, context).items():
            outputs.setdefault(name, []).append(changed(x_BLD, context).cpu())
        outputs.setdefault("plain", []).append(block(x_BLD, context).cpu())
    unit = "of the output"
    figures = [
        CheckedFigure(f"KV cache, {name}: CPU against GPU", relative_error(*pair), unit, most=MOST)
        for name, pair in outputs.items()
    ]
    differing = float((outputs["not cast"][1] != outputs["plain"][1]).sum())
    moved = relative_error(outputs["4 bits"][1], outputs["plain"][1])
    name = "KV cache, not cast: entries that differ from sdpa's"
    return [
        *figures,
        CheckedFigure(name, differing, "", most=0.0),
        CheckedFigure("KV cache, 4 bits: error", moved, unit),
    ]


def _cached(block: Block, x_BLD: Tensor, context: Context) -> dict[str, Block]:
    """Copies of a block by what its cache holds."""
    copies = {name: block.copy() for name in ("not cast", "4 bits", "FP8")}
    attach(copies["not cast"], CacheCast(nn.Identity(), nn.Identity()))
    rotated = Places({}, head_rotation=hadamard_matrix(block.attention.head_dim))
    cast_cache(copies["4 bits"], parse_spec("kv4-quarot"), rotated)
    ranges = watch_cache(copies["FP8"], Places({}))
    copies["FP8"].attended(x_BLD, context)
    cast_cache(copies["FP8"], parse_spec("kvfp8"), Places({}), ranges)
    return copies


def grids(workbench: Workbench) -> list[CheckedFigure]:
    """Codes of each grid, to the nearest and by GPTQ, whose columns a CUDA graph rounds."""
    width, device = workbench.sizes.compared.hidden_size, workbench.torch_device
    generator = torch.Generator().manual_seed(0)
    inputs_NI, weight_OI = (torch.randn(4 * width, width, generator=generator) for _ in range(2))
    hessian = InputHessian(width, torch.device("cpu"), torch.float32)
    hessian.add(inputs_NI)
    figures = []
    for name in GRIDS:
        for method, least in (("", 1.0), ("gptq-", 0.999)):
            spec = grid_spec(method + name)
            here, there = (
                _codes(weight_OI.to(at), hessian.mean("linear").to(at), spec).cpu()
                for at in (torch.device("cpu"), device)
            )
            equal = float((here == there).double().mean())
            title = f"{spec.name}, CPU against GPU: equal codes"
            figures.append(CheckedFigure(title, equal, "of all", least=least))
    return figures


def _codes(weight_OI: Tensor, hessian_II: Tensor, spec: GridSpec) -> Tensor:
    if not isinstance(spec, ColumnSpec):
        return round_to_nearest(weight_OI, spec).codes_OI
    return gptq(weight_OI, prepare(hessian_II, spec, "linear"), spec).codes_OI
