"""The proof that a saved checkpoint holds the weights that were measured."""

import shutil
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.ranks import Ranks
from ckpt_tools.formats.weights import DTYPES
from quant_eval.measuring.losses import EvaluationSet, PairedLosses, paired_losses
from quant_eval.measuring.streams import evaluated_stream
from quant_eval.model.streamed import StreamedModel
from quant_eval.saved.reader import SavedWeights
from quant_eval.settings import ComputeSettings

TOLERANCE = 1e-6  # the same weights by the same code


def prove_saved(
    checkpoint: Path,
    measured: PairedLosses,
    data: EvaluationSet,
    compute: ComputeSettings,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the cross-entropy of the checkpoint, and its difference from the measured one.

    UserError if it is not reproduced; the checkpoint is removed.
    """
    # the evaluated text through the saved model, block by block
    dtype = DTYPES[compute.dtype]
    weights = SavedWeights(checkpoint, dtype)
    model = StreamedModel(checkpoint, weights, dtype, ranks.device)
    share = data.batches(compute.batch_size)[ranks.rank :: ranks.size]
    stream = evaluated_stream(model, data, share)
    for index in range(model.num_blocks):
        block = model.block(index)
        weights.restore(block)
        stream.advance(block)

    # its losses, once alone: it is both models of the pair
    final = stream.activations
    (own,) = paired_losses(model.head(), final, [final], data, share, ranks)
    reloaded, expected = float(own.nll.sum()), float(measured.nll_quantized.sum())
    difference = abs(reloaded / expected - 1)
    report = {
        "cross_entropy": reloaded / float(own.tokens.sum()),
        "relative_difference": difference,
        "tolerance": TOLERANCE,
    }

    # every rank has read the files before they are removed
    ranks.wait()
    if not difference <= TOLERANCE:  # nor NaN
        if ranks.rank == 0:
            shutil.rmtree(checkpoint)
        raise UserError(
            f"{checkpoint} does not reproduce the measured loss ({report}) and was removed; report"
            " this as a defect"
        )
    return report
