"""Saving what was measured as a checkpoint in the GPTQ format, and the proof that the files hold it.

Shapes: N blocks, L tokens of a block, U units.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.ranks import Ranks
from quant_eval.gptq_format.reader import SavedWeights
from quant_eval.gptq_format.reload import reload_with_gptqmodel
from quant_eval.losses import EvaluationSet, PairedLosses, paired_losses
from quant_eval.settings import ComputeSettings
from quant_eval.streamed import StreamedModel
from quant_eval.walk import evaluated_stream
from train.command import UserError

CHECKPOINT = "checkpoint"  # below a result's directory
OWN_TOLERANCE = 1e-6  # the same weights by the same code
GPTQMODEL_TOLERANCE = 1e-4  # in fp32, where it differs from us by the order of its sums
GPTQMODEL_BLOCKS = 8


def reloaded_losses(checkpoint: Path, data: EvaluationSet, compute: ComputeSettings, ranks: Ranks) -> PairedLosses:
    """Losses of a saved checkpoint, dequantized from its files; `nll` of it, the rest of it beside itself."""
    dtype = DTYPES[compute.dtype]
    model = StreamedModel(checkpoint, SavedWeights(checkpoint, dtype), dtype, ranks.device)
    share = data.batches(compute.batch_size)[ranks.rank :: ranks.size]
    stream = evaluated_stream(model, data, share, compute, ranks)
    for index in range(model.num_blocks):
        stream.advance(model.block(index))
    (losses,) = paired_losses(model.head(), stream.activations, [stream.activations], data, share, ranks)
    return losses


def prove_saved(
    checkpoint: Path, measured: PairedLosses, data: EvaluationSet, compute: ComputeSettings, ranks: Ranks
) -> dict[str, Any]:
    """Reads the checkpoint back twice, by this project and by gptqmodel, and compares losses.

    Returns:
        The reloaded cross-entropy, nats per token, and relative differences: to the measured loss over all documents,
        and between the two readers over the first equally long blocks.

    Raises:
        UserError: a loss is not reproduced; the checkpoint is removed.
    """
    own = reloaded_losses(checkpoint, data, compute, ranks)
    reloaded, expected = float(own.nll.sum()), float(measured.nll_quantized.sum())
    difference = abs(reloaded / expected - 1)
    report: dict[str, Any] = {
        "cross_entropy": reloaded / float(own.tokens.sum()),
        "relative_difference": difference,
        "tolerance": OWN_TOLERANCE,
    }
    other = 0.0
    blocks = _equal_blocks(data)
    alone = ranks._replace(rank=0, size=1)
    few = EvaluationSet(blocks, list(range(len(blocks))), list(range(len(blocks))), 0)
    if difference <= OWN_TOLERANCE and ranks.rank == 0:
        nll_N = reload_with_gptqmodel(
            checkpoint,
            torch.from_numpy(np.stack(blocks)),
            dtype="fp32",
            batch_size=compute.batch_size,
            threads=torch.get_num_threads(),
        )
        in_fp32 = compute.model_copy(update={"dtype": "fp32"})
        ours = float(reloaded_losses(checkpoint, few, in_fp32, alone).nll.sum())
        other = abs(float(nll_N.sum()) / ours - 1)
        report["gptqmodel"] = {"blocks": len(blocks), "relative_difference": other, "tolerance": GPTQMODEL_TOLERANCE}
    ranks.wait()
    if difference > OWN_TOLERANCE or other > GPTQMODEL_TOLERANCE:
        if ranks.rank == 0:
            shutil.rmtree(checkpoint)
        raise UserError(
            f"{checkpoint} does not reproduce the measured loss ({report}) and was removed; report this as a defect"
        )
    return report


def _equal_blocks(data: EvaluationSet) -> list[Any]:
    longest = max(len(block) for block in data.blocks)
    return [block for block in data.blocks if len(block) == longest][:GPTQMODEL_BLOCKS]
