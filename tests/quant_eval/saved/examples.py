"""Small quantized models, saved: rounded with groups in any order and zeros at both ends of the
codes, or the blocks that were measured.

Shapes: O output features, I input features, N sequences, L tokens, V vocabulary.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from base.ranks import ALONE
from ckpt_tools.formats.weights import DTYPES
from quant_eval.group import Rounded
from quant_eval.measuring.walk import Variant, walk
from quant_eval.model.streamed import Block
from quant_eval.quantizer import ColumnSpec, GridSpec
from quant_eval.rounding.gptq import gptq, prepare
from quant_eval.rounding.grid import round_to_nearest
from quant_eval.saved.checkpoint import CheckpointWriter
from quant_eval.settings import ComputeSettings
from quant_eval.specs import parse_spec
from tests.conftest import VOCAB_SIZE
from tests.quant_eval.models import open_model
from tests.quant_eval.specs import grid_spec

# All widths, symmetries, kinds of groups and orders; every width with a zero that a 'gptq'
# checkpoint could not hold.
SPECS = (
    "gptq-b2-g16-actorder-s16",
    "rtn-b2-perchannel-asym-s16",
    "gptq-b3-g32-s16",
    "gptq-b3-g32-asym-actorder-s16",
    "gptq-b3-perchannel-s16",
    "gptq-b3-g16-asym-groupaware-s16",
    "gptq-b4-g32-groupaware-s16",
    "gptq-b4-g32-asym-s16",
    "gptq-b8-perchannel-actorder-s16",
    "gptq-b8-g16-asym-actorder-s16",
)
BY_TRANSFORMERS = (
    "gptq-b3-g32-asym-actorder-s16",
    "gptq-b4-g32-asym-s16",
    "gptq-b4-g32-groupaware-s16",
)


@dataclass(frozen=True)
class Example:
    """A checkpoint, and what it was saved from."""

    out: Path
    spec: GridSpec
    rounded: dict[str, Rounded]  # by parameter name
    dense: PreTrainedModel  # the model with the quantized weights, fp32


def round_linear(weight_OI: Tensor, spec: GridSpec, generator: torch.Generator) -> Rounded:
    """Rounded on uncorrelated inputs of random sizes; the first row has no negative weight, the
    second no positive one.
    """
    weight_OI = torch.cat([weight_OI[:1].abs(), -weight_OI[1:2].abs(), weight_OI[2:]])
    if not isinstance(spec, ColumnSpec):
        return round_to_nearest(weight_OI, spec)
    sizes_I = torch.rand(weight_OI.shape[1], generator=generator, dtype=torch.float64)
    return gptq(weight_OI, prepare(sizes_I.diag(), spec, "example"), spec)


def save_example(
    hf_dir: Path, out: Path, name: str, dtype: Literal["fp32", "bf16"] = "fp32"
) -> Example:
    """Rounds all linears of the decoder blocks and saves them."""
    spec, generator = grid_spec(name), torch.Generator().manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    linears = {
        f"{path}.weight": part.weight
        for path, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and ".layers." in path
    }
    rounded = {
        path: round_linear(weight.detach(), spec, generator) for path, weight in linears.items()
    }
    with CheckpointWriter(hf_dir, out, spec, dtype).collecting() as writer:
        for path in reversed(rounded):  # any order
            writer.add(path, rounded[path])
        writer.finish({"model": {"path": str(hf_dir)}})
    with torch.no_grad():
        for path, weight in linears.items():
            weight.copy_(rounded[path].dense())
    return Example(out, spec, rounded, model.eval())


@dataclass(frozen=True)
class Measured:
    """A checkpoint, and the model whose blocks were quantized."""

    out: Path
    model: Any


def save_measured(hf_dir: Path, out: Path, name: str, dtype: Literal["fp32", "bf16"]) -> Measured:
    """Quantize block by block as a measurement does, calibrated on `input_ids`, and save."""
    spec = parse_spec(name)
    model: Any = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=DTYPES[dtype])
    streamed = open_model(hf_dir, DTYPES[dtype])
    settings = ComputeSettings(dtype=dtype, batch_size=4, device="cpu")
    ids_NL = input_ids() if spec.needs_calibration else None
    with CheckpointWriter(hf_dir, out, spec, dtype).collecting() as writer:

        def finished(index: int, block: Block) -> None:
            writer.add_block(index, block)
            model.model.layers[index] = copy.deepcopy(block.module)

        walk(streamed, [Variant(spec, ids_NL, None, writer.add, finished)], None, settings, ALONE)
        writer.finish({})
    return Measured(out, model.eval())


def input_ids() -> Tensor:
    """Blocks of tokens, int64 [N, L]."""
    return torch.randint(VOCAB_SIZE, (4, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> Tensor:
    """Logits of `input_ids`, [N, L, V]."""
    logits: Tensor = model(input_ids=input_ids(), use_cache=False).logits
    return logits
