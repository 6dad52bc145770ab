"""One walk through a model, block by block: quantized for every spec, evaluated on the way.

Shapes: L tokens of a sequence, B sequences of a batch.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from base.progress import Progress
from base.ranks import Ranks
from ckpt_tools.hf.measured import Linear
from quant_eval.draws import Draw, batches_of
from quant_eval.libraries.job import OpenModel, Report
from quant_eval.measuring.groups import Keep
from quant_eval.measuring.losses import EvaluationSet, PairedLosses, paired_losses
from quant_eval.measuring.room import Room, room_for, sizes_of
from quant_eval.measuring.sequential import BlockQuantizer, Buffers
from quant_eval.measuring.streams import Evaluated, Stream, evaluated_stream
from quant_eval.model.activations import Activations
from quant_eval.model.streamed import Block, StreamedModel
from quant_eval.quantizer import QuantSpec
from quant_eval.settings import ComputeSettings
from quant_eval.transforms.placement import places_of

Finished = Callable[[int, Block], None]
# With all blocks quantized, None if nothing is evaluated; with one alone; with all but that.
LossesOfVariant = tuple[PairedLosses | None, list[PairedLosses], list[PairedLosses]]


@dataclass(frozen=True)
class Variant:
    """One quantized model to be made.

    Attributes:
        calibration: what its Hessians are estimated on; None for methods without them.
        library: opens the model as another project's library quantized it; None for ours.
        keep: takes the codes of every linear, for a checkpoint.
        finished: takes every quantized block.
        by_block: whether each block is also quantized alone, and all but it.
        seed: of random signs and of what is learned.
    """

    spec: QuantSpec
    calibration: Draw | None
    library: OpenModel | None = None
    keep: Keep | None = None
    finished: Finished | None = None
    by_block: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Quantized:
    """One quantized model, measured.

    Attributes:
        room: where its streams were kept.
        report: of the library that quantized it.
        errors: of every linear, in the order in which they compute.
        losses: beside those of the full-precision model; None if nothing was evaluated.
        alone: for each block, the losses with that block quantized alone.
        others: for each block, the losses with all blocks but that quantized.
    """

    room: Room
    report: Report | None
    errors: list[Linear]
    losses: PairedLosses | None
    alone: list[PairedLosses]
    others: list[PairedLosses]


@torch.no_grad()
def walk(
    model: StreamedModel,
    variants: Sequence[Variant],
    data: EvaluationSet | None,
    compute: ComputeSettings,
    ranks: Ranks,
) -> list[Quantized]:
    """Quantize and, if `data` is given, evaluate every variant.

    As many variants as there is room for go through the model together; those of another project's
    library one at a time, since its weights are files. What the full-precision model computes is
    kept from the first to the last.

    Calibration sequences and evaluated batches are shared out over the ranks; every rank returns
    the losses of all.

    UserError if a weight is not finite, a Hessian or a weight does not fit the spec, or the streams
    do not fit the memory.
    """
    passes = _Passes(model, variants, data, compute, ranks)
    ours = [number for number, variant in enumerate(variants) if not variant.library]
    together = passes.room.together
    groups = [[number] for number, variant in enumerate(variants) if variant.library]  # may fail
    groups += [ours[start : start + together] for start in range(0, len(ours), together)]
    quantized: dict[int, Quantized] = {}
    for numbers in groups:
        results = passes.quantize([variants[number] for number in numbers])
        quantized |= dict(zip(numbers, results, strict=True))
    return [quantized[number] for number in range(len(variants))]


class _Passes:
    """Passes through one model, for some of the variants each.

    Attributes:
        room: where the streams are kept.
    """

    def __init__(
        self,
        model: StreamedModel,
        variants: Sequence[Variant],
        data: EvaluationSet | None,
        compute: ComputeSettings,
        ranks: Ranks,
    ) -> None:
        self._model, self._data, self._compute, self._ranks = model, data, compute, ranks
        self._share = data.batches(compute.batch_size)[ranks.rank :: ranks.size] if data else []
        self._final: Activations | None = None  # the full-precision model's, after the last block
        draws = [self._calibration(each) for each in variants]
        evaluated = [data.padded(batch)[:, :-1].shape for batch in self._share] if data else []
        by_block = any(variant.by_block for variant in variants)
        sizes = sizes_of(
            model,
            calibration=max((sum(map(Tensor.numel, batches)) for batches in draws), default=0),
            evaluated=sum(rows * columns for rows, columns in evaluated),
            # The quantized stream, and two of each block: it alone, and all but it.
            forks=1 + 2 * model.num_blocks if by_block else 1,
            batch=max(
                [
                    *(tokens_BL.numel() for batches in draws for tokens_BL in batches),
                    *(rows * columns for rows, columns in evaluated),
                ],
                default=0,
            ),
        )
        self.room = room_for(sizes, len(variants), ranks)

    def quantize(self, variants: Sequence[Variant]) -> list[Quantized]:
        """Quantize and evaluate variants in one pass through the model."""
        with ExitStack() as cleanup:
            # Their files exist while the pass reads them.
            libraries = [
                variant.library and cleanup.enter_context(variant.library()) for variant in variants
            ]
            models = [library[0] if library else None for library in libraries]
            errors, evaluated = self._pass(variants, models)
        reports = [library[1] if library else None for library in libraries]
        losses = self._losses(evaluated) or [(None, [], [])] * len(variants)
        return [
            Quantized(self.room, report, linears, *losses_of_variant)
            for report, linears, losses_of_variant in zip(reports, errors, losses, strict=True)
        ]

    def _pass(
        self, variants: Sequence[Variant], libraries: Sequence[StreamedModel | None]
    ) -> tuple[list[list[Linear]], list[Evaluated]]:
        """Return the errors of each variant's linears, and its evaluated text after all blocks."""
        model, full = self._model, None
        if self._data is not None:
            full = evaluated_stream(model, self._data, self._share, self.room.on_device)
        # Its outputs are kept after the first pass; later it runs only where streams fork from it.
        runs_full = self._final is None or any(variant.by_block for variant in variants)
        evaluated = [Evaluated(full, variant.by_block) for variant in variants] if full else []
        quantizers = self._quantizers(variants)

        # one block of the full model is in memory, and its copy for one variant after the other
        errors: list[list[Linear]] = [[] for _ in variants]
        with Progress("quantize", total=model.num_blocks * len(variants)) as progress:
            for index in range(model.num_blocks):
                block = model.block(index)
                for number, (variant, library) in enumerate(zip(variants, libraries, strict=True)):
                    quantized = block.copy()
                    theirs = library.block(index) if library else None
                    is_last = index == model.num_blocks - 1
                    errors[number] += quantizers[number](quantized, theirs, is_last)
                    if variant.finished:
                        variant.finished(index, quantized)
                    if full:
                        evaluated[number].advance(full, block, quantized)
                    progress.advance()
                if full and runs_full:
                    full.advance(block)
        if full and self._final is None:
            # Not written any more: the next pass embeds a stream of its own.
            self._final = full.activations
        return errors, evaluated

    def _losses(self, evaluated: Sequence[Evaluated]) -> list[LossesOfVariant]:
        """Return the losses of each variant, of its blocks alone, and of all but each block."""
        if self._data is None or self._final is None:
            return []
        activations = [
            stream.activations
            for text in evaluated
            for stream in (text.quantized, *text.alone, *text.others)
        ]
        head = self._model.head()
        # Losses come in the order of `activations`.
        losses = iter(
            paired_losses(head, self._final, activations, self._data, self._share, self._ranks)
        )
        return [
            (next(losses), [next(losses) for _ in text.alone], [next(losses) for _ in text.others])
            for text in evaluated
        ]

    def _calibration(self, variant: Variant) -> list[Tensor]:
        """Return this rank's share of the calibration sequences of a variant, in batches [B, L]."""
        draw = variant.calibration
        if draw is None:
            return []
        share = self._ranks.share(len(draw))
        return batches_of(draw[share.start : share.stop], self._compute.batch_size)

    def _quantizers(self, variants: Sequence[Variant]) -> list[BlockQuantizer]:
        quantizers, buffers = list[BlockQuantizer](), Buffers()
        for variant in variants:
            batches = self._calibration(variant)
            stream = Stream(self._model, batches, on_device=self.room.on_device)
            quantizers.append(
                BlockQuantizer(
                    variant.spec,
                    stream.activations,
                    stream.contexts,
                    self._ranks,
                    buffers,
                    self.room.keeps_gated,
                    places_of(variant.spec, self._model.family, self._model.config),
                    variant.keep,
                    variant.seed,
                )
            )
        return quantizers
