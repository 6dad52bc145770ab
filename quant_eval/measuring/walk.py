"""One walk through a model, block by block: quantized for every spec, evaluated on the way.

Shapes: N calibration sequences, L tokens of a sequence, B sequences of a batch.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from base.progress import Progress
from base.ranks import Ranks
from ckpt_tools.hf.measured import Linear
from quant_eval.measuring.losses import EvaluationSet, PairedLosses, paired_losses
from quant_eval.measuring.sequential import BlockQuantizer, Keep
from quant_eval.model.activations import Activations
from quant_eval.model.streamed import Block, StreamedModel
from quant_eval.settings import ComputeSettings
from quant_eval.specs import QuantSpec

Finished = Callable[[int, Block], None]


@dataclass(frozen=True)
class Variant:
    """One quantized model to be made.

    Attributes:
        calibration_NL: token ids its Hessians are estimated on; None for methods without them.
        given: the model as another project's library left it; None for own methods.
        keep: takes the codes of every linear, for a checkpoint.
        finished: takes every quantized block.
        by_block: whether each block is also quantized alone, and all but it.
    """

    spec: QuantSpec
    calibration_NL: Tensor | None
    given: StreamedModel | None = None
    keep: Keep | None = None
    finished: Finished | None = None
    by_block: bool = False


@dataclass(frozen=True)
class Quantized:
    """One quantized model, measured.

    Attributes:
        errors: of every linear, in the order in which they compute.
        losses: beside those of the full-precision model; None if nothing was evaluated.
        alone: for each block, the losses with that block quantized alone.
        others: for each block, the losses with all blocks but that quantized.
    """

    errors: list[Linear]
    losses: PairedLosses | None
    alone: list[PairedLosses]
    others: list[PairedLosses]


class Stream:
    """Token batches on their way through the blocks."""

    def __init__(
        self,
        model: StreamedModel,
        batches: Sequence[Tensor],
        lengths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`lengths` of the sequences of each batch without their padding; None: there is none."""
        self._model = model
        self._lengths = lengths or [[tokens.shape[1]] * len(tokens) for tokens in batches]
        shapes = [(len(tokens_BL), tokens_BL.shape[1]) for tokens_BL in batches]
        self.activations = Activations(shapes, model.config.hidden_size, model.dtype, model.device)
        embedding = model.embedding()
        for index, tokens_BL in enumerate(batches):
            self.activations.write(index, embedding(tokens_BL.to(model.device)))
        by_length = {length: model.context(length) for length in {length for _, length in shapes}}
        self.contexts = [by_length[length] for _, length in shapes]

    def fork(self) -> "Stream":
        """Return another at the same place."""
        other = copy.copy(self)
        other.activations = self.activations.fork()
        return other

    @torch.no_grad()
    def advance(self, block: Block) -> None:
        """Compute one block."""
        for index, context in enumerate(self.contexts):
            x_BLD = self.activations.read(index)
            if block.mixes_sequences:  # so each sequence alone, and without its padding
                made_BLD = torch.zeros_like(x_BLD)
                for row, length in enumerate(self._lengths[index]):
                    alone_1LD = x_BLD[row : row + 1, :length]
                    made_BLD[row, :length] = block(alone_1LD, self._model.context(length))[0]
            else:
                made_BLD = block(x_BLD, context)
            self.activations.write(index, made_BLD)


def evaluated_stream(
    model: StreamedModel, data: EvaluationSet, share: Sequence[Sequence[int]]
) -> Stream:
    """Return the evaluated batches of this rank, as the first block reads them."""
    lengths = [[len(data.blocks[block]) - 1 for block in batch] for batch in share]
    return Stream(model, [data.padded(batch)[:, :-1] for batch in share], lengths)


class _Evaluated:
    """The evaluated text in one quantized model and, if asked for, in partly quantized ones."""

    def __init__(self, full: Stream, by_block: bool) -> None:
        self.quantized = full.fork()
        self.alone: list[Stream] = []
        self.others: list[Stream] = []
        self._by_block = by_block

    def advance(self, full: Stream, block: Block, quantized: Block) -> None:
        """Compute one block, which `full` has still before it."""
        for stream in self.alone:
            stream.advance(block)
        for stream in self.others:
            stream.advance(quantized)
        if self._by_block:
            # this block alone quantized parts from the full model here, all but it from the
            # quantized one
            self.alone.append(full.fork())
            self.alone[-1].advance(quantized)
            self.others.append(self.quantized.fork())
            self.others[-1].advance(block)
        self.quantized.advance(quantized)


@torch.no_grad()
def walk(
    model: StreamedModel,
    variants: Sequence[Variant],
    data: EvaluationSet | None,
    compute: ComputeSettings,
    ranks: Ranks,
) -> list[Quantized]:
    """Quantize and, if `data` is given, evaluate every variant; the full model runs once for all.

    Calibration sequences and evaluated batches are shared out over the ranks; every rank returns
    the losses of all.

    UserError if a weight is not finite, or a Hessian or a weight does not fit the spec.
    """
    share = data.batches(compute.batch_size)[ranks.rank :: ranks.size] if data else []
    full = evaluated_stream(model, data, share) if data else None
    quantizers = [_quantizer(model, variant, compute, ranks) for variant in variants]
    evaluated = [_Evaluated(full, variant.by_block) for variant in variants] if full else []
    errors: list[list[Linear]] = [[] for _ in variants]
    with Progress("quantize", total=model.num_blocks * len(variants)) as progress:
        for index in range(model.num_blocks):
            block = model.block(index)
            for number, (variant, quantizer) in enumerate(zip(variants, quantizers, strict=True)):
                quantized = block.copy()
                given = variant.given.block(index) if variant.given else None
                errors[number] += quantizer(quantized, given, index == model.num_blocks - 1)
                if variant.finished:
                    variant.finished(index, quantized)
                if full:
                    evaluated[number].advance(full, block, quantized)
                progress.advance()
            if full:
                full.advance(block)
    if not full or not data:
        return [Quantized(own, None, [], []) for own in errors]
    streams = [each for one in evaluated for each in (one.quantized, *one.alone, *one.others)]
    activations = [stream.activations for stream in streams]
    losses = iter(paired_losses(model.head(), full.activations, activations, data, share, ranks))
    return [
        Quantized(
            own, next(losses), [next(losses) for _ in one.alone], [next(losses) for _ in one.others]
        )
        for own, one in zip(errors, evaluated, strict=True)
    ]


def _quantizer(
    model: StreamedModel, variant: Variant, compute: ComputeSettings, ranks: Ranks
) -> BlockQuantizer:
    batches: Sequence[Tensor] = []
    if variant.calibration_NL is not None:
        share = ranks.share(len(variant.calibration_NL))
        own_NL = variant.calibration_NL[share.start : share.stop]
        batches = own_NL.split(compute.batch_size) if len(own_NL) else []
    stream = Stream(model, batches)
    return BlockQuantizer(variant.spec, stream.activations, stream.contexts, ranks, variant.keep)
