"""Outlier statistics of a model's linears: of what they read on a text, and of their weights.

Shapes: B sequences of a batch, L tokens of a sequence, D hidden features, I input features, N
    blocks of the text, U documents, K sums of a row.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from base.environment import environment
from base.outlier_names import FIGURES, KINDS, STATISTICS
from base.outliers import OutlierSums, statistics
from base.progress import Progress
from base.ranks import Ranks
from base.statistics import INTERVAL_LEVEL
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import DTYPES
from ckpt_tools.hf.model import identify
from quant_eval.bos import bos_of
from quant_eval.measuring.documents import check_documents
from quant_eval.measuring.losses import EvaluationSet, evaluation_set
from quant_eval.measuring.streams import evaluated_stream
from quant_eval.measuring.texts import open_text
from quant_eval.model.streamed import Block, Context, StreamedModel
from quant_eval.settings import LINEARS, OutlierRunSettings
from train.model.families import ARCHITECTURES

INPUT, WEIGHT = KINDS
# By name of a linear: its figures, of its inputs the one of all documents and those without each.
Measured = dict[str, dict[str, Tensor]]


@torch.no_grad()
def measure(hf_dir: Path, settings: OutlierRunSettings, ranks: Ranks) -> dict[str, Any]:
    """Return the content of result.json, by one forward pass.

    Ranks share the batches; their number changes no bit. UserError if text and model do not fit, or
    there are too few documents.
    """
    # Hashing reads every weight; only the first rank writes what needs it.
    identity = identify(hf_dir, ARCHITECTURES) if ranks.rank == 0 else {}
    model = StreamedModel(hf_dir, HFWeights(hf_dir), DTYPES[settings.dtype], ranks.device)
    corpus = open_text(settings.data, hf_dir, model.config.vocab_size)
    context, bos = model.config.max_position_embeddings, bos_of(hf_dir, settings.bos)
    length, seed = settings.block_length(context), settings.eval_seed
    data = evaluation_set(corpus, length, settings.eval_tokens, "separate", seed, bos)
    check_documents(corpus, len(data.documents))

    linears = _linears(model, data, settings, ranks)
    spec = settings.described(context, corpus.manifest.sha256)
    spec["outliers"]["bos_token_ids"] = list(bos)
    return {
        "model": identity,
        "spec": {"name": LINEARS} | spec | {"device": settings.device, "ranks": ranks.size},
        "measured": {
            "figures": {figure: _over_linears(linears, figure) for figure in FIGURES},
            "linears": [
                {"name": name} | {figure: _defined(values[0]) for figure, values in figures.items()}
                for name, figures in linears.items()
            ],
            "tokens": sum(len(block) - 1 for block in data.blocks),
            "documents": len(data.documents),
            "units": UNITS,
        },
        "environment": environment(),
    }


UNITS = {
    **dict.fromkeys(FIGURES, "1"),
    "standard_error": "that of the figure: jackknife over documents; a weight has none",
    "interval": f"that of the figure: {100 * INTERVAL_LEVEL:g}% by Student's t",
    "tokens": "tokens that the linears read",
    "documents": "documents",
}


def _linears(
    model: StreamedModel, data: EvaluationSet, settings: OutlierRunSettings, ranks: Ranks
) -> Measured:
    """Return the figures of every linear of the blocks, in the order in which they compute."""
    share = data.batches(settings.batch_size)[ranks.rank :: ranks.size]
    stream = evaluated_stream(model, data, share, on_device=True)
    measured: Measured = {}
    with Progress("outliers", total=model.num_blocks) as progress:
        for index in range(model.num_blocks):
            block = model.block(index)
            groups = block.linears()
            sites = [_DocumentSums(data, next(iter(group.values())), ranks) for group in groups]
            for number, (batch, context) in enumerate(zip(share, stream.contexts, strict=True)):
                *inputs, output_BLD = _reads(block, stream.activations.read(number), context)
                for site, input_BLI in zip(sites, inputs, strict=True):
                    site.add(batch, input_BLI)
                stream.activations.write(number, output_BLD)
            for site, group in zip(sites, groups, strict=True):
                of_inputs = site.statistics()
                for name, linear in group.items():
                    of_weight = OutlierSums.over([linear.weight]).statistics()
                    measured[name] = {f"{INPUT}_{key}": of_inputs[key] for key in STATISTICS}
                    measured[name] |= {
                        f"{WEIGHT}_{key}": torch.tensor([of_weight[key]]) for key in STATISTICS
                    }
            progress.advance()
    return measured


def _reads(block: Block, x_BLD: Tensor, context: Context) -> Iterator[Tensor]:
    """Yield what each group of linears reads, in their order, then the output of the block."""
    yield block.attention_input(x_BLD)
    attended = block.attended(x_BLD, context)
    yield attended
    read_BLD, added_BLD = block.after_attention(x_BLD, attended)
    yield block.mlp_input(read_BLD)
    gated = block.gated(read_BLD)
    yield gated
    yield block.after_mlp(added_BLD, gated)


class _DocumentSums:
    """The sums over each block of the text of what some linears read."""

    def __init__(self, data: EvaluationSet, linear: torch.nn.Linear, ranks: Ranks) -> None:
        self._data, self._ranks = data, ranks
        empty = OutlierSums(linear.in_features, torch.device("cpu"))
        self._sums_NK, self._squares_NI = (
            sums.repeat(len(data.blocks), 1) for sums in (empty.sums_K, empty.squares_I)
        )

    def add(self, batch: list[int], input_BLI: Tensor) -> None:
        """Add the blocks of a batch, without their padding."""
        for block, input_LI in zip(batch, input_BLI, strict=True):
            sums = OutlierSums.over([input_LI[: len(self._data.blocks[block]) - 1]])
            self._sums_NK[block], self._squares_NI[block] = sums.sums_K, sums.squares_I

    def statistics(self) -> dict[str, Tensor]:
        """Return every statistic over all documents, then without each, [1 + U]."""
        # A block is one rank's alone: the others add zeros.
        self._ranks.sum(self._sums_NK)
        self._ranks.sum(self._squares_NI)
        return statistics(self._without_each(self._sums_NK), self._without_each(self._squares_NI))

    def _without_each(self, values: Tensor) -> Tensor:
        """Return the sum over all documents, then over all but each, of values [N, ...]."""
        owner_N = torch.tensor(self._data.owner)
        by_document = values.new_zeros(len(self._data.documents), values.shape[1])
        by_document.index_add_(0, owner_N, values)
        total = by_document.sum(0, keepdim=True)
        return torch.cat([total, total - by_document])


def _over_linears(linears: Measured, figure: str) -> dict[str, Any]:
    """Return the mean of a figure over the linears, its standard error, and the largest.

    The error is for other documents, by leaving out each (the jackknife: Efron and Tibshirani 1993,
    chapter 11), the interval that of a Student t. Neither mean nor largest is defined where a
    linear has no such figure, whose name stands for the largest.
    """
    values = {name: figures[figure] for name, figures in linears.items()}
    for name, value in values.items():
        if not math.isfinite(value[0]):
            return {"mean": None, "max": None, "linear": name}
    mean, *without_U = torch.stack(list(values.values())).mean(0).tolist()
    largest = max(values, key=lambda name: float(values[name][0]))
    summary: dict[str, Any] = {"mean": mean, "max": float(values[largest][0]), "linear": largest}
    # Without one document a linear may read zeros alone.
    if without_U and all(map(math.isfinite, without_U)):
        degrees = len(without_U) - 1
        error = math.sqrt(degrees * np.var(without_U))
        reach = error * stdtrit(degrees, (1 + INTERVAL_LEVEL) / 2)
        summary |= {"standard_error": error, "interval": [mean - reach, mean + reach]}
    return summary


def _defined(value: Tensor | float) -> float | None:
    """Return a number, or None of a ratio to zero."""
    return float(value) if math.isfinite(value) else None
