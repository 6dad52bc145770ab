"""A transformers model with the blocks that were measured, saved on the way.

Shapes: N sequences, L tokens.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoModelForCausalLM

from base.ranks import ALONE
from ckpt_tools.formats.weights import DTYPES
from quant_eval.measuring.walk import Variant, walk
from quant_eval.model.streamed import Block
from quant_eval.saved.checkpoint import CheckpointWriter
from quant_eval.settings import ComputeSettings
from quant_eval.specs import parse_spec
from tests.quant_eval.models import open_model
from tests.quant_eval.saved.examples import input_ids


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
