"""One walk through a model, block by block: quantized for every spec, and evaluated before and after, on the way.

Shapes: N calibration sequences, L tokens of a sequence, B sequences of a batch.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt_tools.formats.hf_weights import read_header
from ckpt_tools.formats.weights import DTYPES, Described, FileTensor, Weights
from ckpt_tools.ranks import Ranks
from quant_eval.activations import Activations
from quant_eval.losses import EvaluationSet, PairedLosses, paired_losses
from quant_eval.sequential import BlockQuantizer, Keep, check_groups
from quant_eval.settings import ComputeSettings
from quant_eval.specs import QuantSpec
from quant_eval.streamed import Block, StreamedModel
from train.command import Progress

Finished = Callable[[int, Block], None]


class Overlaid:
    """Weights of which some lie in another file."""

    def __init__(self, below: Weights, path: Path) -> None:
        self._below = below
        self._above: dict[str, FileTensor] = read_header(path)
        assert self._above.keys() <= below.tensors.keys()

    @property
    def tensors(self) -> Mapping[str, Described]:
        """Those below: names and shapes are the same."""
        return self._below.tensors

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor."""
        above = self._above.get(name)
        return above.read(start, stop) if above else self._below.read(name, start, stop)


@dataclass
class Variant:
    """One quantized model.

    Attributes:
        spec: how.
        calibration_NL: token ids its Hessians are estimated on.
        given: the model as another project's library left it; None for own methods.
        keep: takes the codes of every linear, for a checkpoint.
        finished: takes every quantized block.
        by_block: whether each block is also quantized alone, and all but it.
    """

    spec: QuantSpec
    calibration_NL: Tensor
    given: StreamedModel | None = None
    keep: Keep | None = None
    finished: Finished | None = None
    by_block: bool = False
    errors: list[Any] = field(default_factory=list)
    losses: PairedLosses | None = None
    alone: list[PairedLosses] = field(default_factory=list)
    others: list[PairedLosses] = field(default_factory=list)


class Stream:
    """Token batches on their way through the blocks."""

    def __init__(
        self,
        model: StreamedModel,
        batches: Sequence[Tensor],
        compute: ComputeSettings,
        ranks: Ranks,
        lengths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`lengths` of the sequences of each batch without their padding; None: there is none."""
        self._ranks, self._lengths = ranks, lengths or [[tokens_BL.shape[1]] * len(tokens_BL) for tokens_BL in batches]
        self._model = model
        shapes = [(len(tokens_BL), tokens_BL.shape[1]) for tokens_BL in batches]
        self.activations = Activations(shapes, model.config.hidden_size, DTYPES[compute.dtype], compute.scratch)
        embedding = model.embedding()
        for index, tokens_BL in enumerate(batches):
            self.activations.write(index, embedding(tokens_BL.to(ranks.device)))
        by_length = {length: model.context(length) for length in {length for _, length in shapes}}
        self.contexts = [by_length[length] for _, length in shapes]

    def fork(self) -> "Stream":
        """Another at the same place."""
        other = copy.copy(self)
        other.activations = self.activations.fork()
        return other

    @torch.no_grad()
    def advance(self, block: Block) -> None:
        """Through one block."""
        for index, context in enumerate(self.contexts):
            x_BLD = self.activations.read(index, self._ranks.device)
            if block.mixes_sequences:
                made_BLD = torch.zeros_like(x_BLD)
                for row, length in enumerate(self._lengths[index]):
                    made_BLD[row, :length] = block(x_BLD[row : row + 1, :length], self._model.context(length))[0]
            else:
                made_BLD = block(x_BLD, context)
            self.activations.write(index, made_BLD)


def evaluated_stream(
    model: StreamedModel, data: EvaluationSet, share: Sequence[Sequence[int]], compute: ComputeSettings, ranks: Ranks
) -> Stream:
    """The evaluated batches of this rank, as the first block reads them."""
    lengths = [[len(data.blocks[block]) - 1 for block in batch] for batch in share]
    return Stream(model, [data.padded(batch)[:, :-1] for batch in share], compute, ranks, lengths)


class _Evaluated:
    """The evaluated text on its way through one quantized model and, if asked for, through partly quantized ones."""

    def __init__(self, full: Stream, by_block: bool) -> None:
        self.quantized = full.fork()
        self.alone: list[Stream] = []
        self.others: list[Stream] = []
        self._by_block = by_block

    def advance(self, full: Stream, block: Block, quantized: Block) -> None:
        """Through one block, which `full` has still before it."""
        if self._by_block:
            for stream in self.alone:
                stream.advance(block)
            for stream in self.others:
                stream.advance(quantized)
            for streams, start, passed in ((self.alone, full, quantized), (self.others, self.quantized, block)):
                streams.append(start.fork())
                streams[-1].advance(passed)
        self.quantized.advance(quantized)

    @property
    def streams(self) -> list[Stream]:
        """All of them."""
        return [self.quantized, *self.alone, *self.others]


@torch.no_grad()
def walk(
    model: StreamedModel,
    variants: Sequence[Variant],
    data: EvaluationSet | None,
    compute: ComputeSettings,
    ranks: Ranks,
) -> None:
    """Quantizes and, if `data` is given, evaluates every variant; the full model runs once for all of them.

    Calibration sequences and evaluated batches are shared out over the ranks; the losses of all ranks are in every
    variant of every rank.

    Raises:
        UserError: a weight is not finite, or a Hessian or a weight does not fit the spec.
    """
    for variant in variants:
        check_groups(model, variant.spec)
    share = data.batches(compute.batch_size)[ranks.rank :: ranks.size] if data else []
    full = evaluated_stream(model, data, share, compute, ranks) if data else None
    quantizers = [_quantizer(model, variant, compute, ranks) for variant in variants]
    evaluated = [_Evaluated(full, variant.by_block) for variant in variants] if full else []
    with Progress("quantize", total=model.num_blocks * len(variants)) as progress:
        for index in range(model.num_blocks):
            block = model.block(index)
            for number, (variant, quantizer) in enumerate(zip(variants, quantizers, strict=True)):
                quantized = block.copy()
                given = variant.given.block(index) if variant.given else None
                quantizer(quantized, given, is_last=index == model.num_blocks - 1)
                if variant.finished:
                    variant.finished(index, quantized)
                if full:
                    evaluated[number].advance(full, block, quantized)
                progress.advance()
            if full:
                full.advance(block)
    for variant, quantizer in zip(variants, quantizers, strict=True):
        variant.errors = quantizer.errors
    if full and data:
        activations = [stream.activations for one in evaluated for stream in one.streams]
        found = iter(paired_losses(model.head(), full.activations, activations, data, share, ranks))
        for variant, one in zip(variants, evaluated, strict=True):
            variant.losses = next(found)
            variant.alone = [next(found) for _ in one.alone]
            variant.others = [next(found) for _ in one.others]


def _quantizer(model: StreamedModel, variant: Variant, compute: ComputeSettings, ranks: Ranks) -> BlockQuantizer:
    share = ranks.share(len(variant.calibration_NL))
    own_NL = variant.calibration_NL[share.start : share.stop]
    batch_size = 1 if variant.spec.method == "int8" else compute.batch_size  # see Block.mixes_sequences
    stream = Stream(model, own_NL.split(batch_size) if len(own_NL) else [], compute, ranks)
    return BlockQuantizer(variant.spec, stream.activations, stream.contexts, ranks, variant.keep)
