"""Token batches on their way through the blocks, and the evaluated text in quantized models.

Shapes: B sequences of a batch, L tokens of a sequence, D hidden features.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from quant_eval.measuring.losses import EvaluationSet
from quant_eval.model.activations import Activations
from quant_eval.model.streamed import Block, StreamedModel


class Stream:
    """Token batches on their way through the blocks."""

    def __init__(
        self,
        model: StreamedModel,
        batches: Sequence[Tensor],
        lengths: Sequence[Sequence[int]] | None = None,
        on_device: bool = True,
    ) -> None:
        """Embed the batches.

        `lengths` are those of the sequences of each batch without padding; None: there is none. The
        stream is kept where it is computed if `on_device`, else in pinned memory.
        """
        self._model = model
        self._lengths = lengths or [[tokens.shape[1]] * len(tokens) for tokens in batches]
        shapes = [(len(tokens_BL), tokens_BL.shape[1]) for tokens_BL in batches]
        self.activations = Activations(
            shapes, model.config.hidden_size, model.dtype, model.device, on_device
        )
        embedding = model.embedding()
        for index, tokens_BL in enumerate(batches):
            self.activations.write(index, embedding(tokens_BL.to(model.device)))
        # Batches of one length share their rotary embeddings.
        by_length = {length: model.context(length) for length in {length for _, length in shapes}}
        self.contexts = [by_length[length] for _, length in shapes]

    def fork(self) -> "Stream":
        """Return an independent stream at the same depth."""
        other = copy.copy(self)
        other.activations = self.activations.fork()
        return other

    @torch.no_grad()
    def advance(self, block: Block) -> None:
        """Compute one block."""
        for index, context in enumerate(self.contexts):
            x_BLD = self.activations.read(index)
            if block.mixes_sequences:  # so each sequence alone, and without its padding
                output_BLD = torch.zeros_like(x_BLD)
                for row, length in enumerate(self._lengths[index]):
                    alone_1LD = x_BLD[row : row + 1, :length]
                    output_BLD[row, :length] = block(alone_1LD, self._model.context(length))[0]
            else:
                output_BLD = block(x_BLD, context)
            self.activations.write(index, output_BLD)


def evaluated_stream(
    model: StreamedModel,
    data: EvaluationSet,
    share: Sequence[Sequence[int]],
    on_device: bool,
) -> Stream:
    """Return the evaluated batches of this rank, as the first block reads them."""
    lengths = [[len(data.blocks[block]) - 1 for block in batch] for batch in share]
    return Stream(model, [data.padded(batch)[:, :-1] for batch in share], lengths, on_device)


class Evaluated:
    """The evaluated text in one quantized model and, if asked for, in partly quantized ones."""

    def __init__(self, full: Stream, by_block: bool) -> None:
        self.quantized = full.fork()
        self.alone: list[Stream] = []
        self.others: list[Stream] = []
        self._by_block = by_block

    def advance(self, full: Stream, block: Block, quantized: Block) -> None:
        """Compute a block in every stream, before `full` computes it."""
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
