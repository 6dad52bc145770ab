"""Small quantized models: codes and grids from `fit_grid`, groups in any order, zeros at both
ends of the codes.

Shapes: O output features, I input features, G groups of a row, K inputs of a group, N blocks, L
    tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from quant_eval.group import Rounded
from quant_eval.quantizer import ColumnSpec, GridSpec
from quant_eval.rounding.grid import fit_grid
from quant_eval.saved.checkpoint import CheckpointWriter
from tests.conftest import VOCAB_SIZE
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


@dataclass(frozen=True)
class Example:
    """A checkpoint, and what it was saved from."""

    out: Path
    spec: GridSpec
    rounded: dict[str, Rounded]  # by parameter name
    dense: PreTrainedModel  # the model with the quantized weights, fp32


def input_order(num_inputs: int, spec: GridSpec, generator: torch.Generator) -> Tensor:
    """The order in which inputs are put into groups, int64 [I]."""
    order = spec.order if isinstance(spec, ColumnSpec) else "natural"
    if order == "actorder":
        return torch.randperm(num_inputs, generator=generator)
    if order == "groupaware":
        groups = num_inputs // (spec.group_size or num_inputs)
        return (
            torch.arange(num_inputs)
            .view(groups, -1)[torch.randperm(groups, generator=generator)]
            .flatten()
        )
    return torch.arange(num_inputs)


def round_linear(weight_OI: Tensor, spec: GridSpec, generator: torch.Generator) -> Rounded:
    """Nearest points of a grid with fp16 scales; the first row has no negative weight, the
    second no positive one.
    """
    num_outputs, num_inputs = weight_OI.shape
    order_I = input_order(num_inputs, spec, generator)
    ordered_OI = weight_OI.double()[:, order_I]
    ordered_OI[0], ordered_OI[1] = ordered_OI[0].abs(), -ordered_OI[1].abs()
    weight_KOG = (
        ordered_OI.float().view(num_outputs, -1, spec.group_size or num_inputs).permute(2, 0, 1)
    )
    grid = fit_grid(weight_KOG, spec)
    codes_OI = (grid.steps(weight_KOG) - grid.lowest).permute(1, 2, 0).flatten(1).to(torch.uint8)
    groups = weight_KOG.shape[2]
    groups_I = torch.empty(num_inputs, dtype=torch.int32)
    groups_I[order_I] = torch.arange(groups, dtype=torch.int32).repeat_interleave(
        num_inputs // groups
    )
    natural_OI = torch.empty_like(codes_OI)
    natural_OI[:, order_I] = codes_OI
    return Rounded(natural_OI, grid.scale, (-grid.lowest).to(torch.uint8), groups_I)


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


def make_gpt_neox(directory: Path) -> Path:
    """A random Pythia: fused query_key_value, biases, lm_head under the name embed_out."""
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=0,
        bos_token_id=0,
        tie_word_embeddings=False,
    )
    model = GPTNeoXForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.15)
    model.save_pretrained(directory)
    return directory


def input_ids() -> Tensor:
    """Blocks of tokens, int64 [N, L]."""
    return torch.randint(VOCAB_SIZE, (4, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> Tensor:
    """Logits of `input_ids`, [N, L, V]."""
    logits: Tensor = model(input_ids=input_ids(), use_cache=False).logits
    return logits
