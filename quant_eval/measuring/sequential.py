"""Quantizing a decoder block, each linear on the inputs that the quantized ones before it produce.

Shapes: B sequences, L tokens of a sequence, D hidden features.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from base.errors import UserError
from base.ranks import Ranks
from ckpt_tools.hf.measured import Linear
from quant_eval.learned import learn_transforms, sample
from quant_eval.measuring.groups import GroupQuantizer, Keep, Linears
from quant_eval.model.activations import Activations
from quant_eval.model.streamed import Block, Context, StreamedModel
from quant_eval.quantizer import QuantSpec
from quant_eval.rotations import ROTATIONS
from quant_eval.rounding.inputs import InputStatistics
from quant_eval.sizes import check_linears
from quant_eval.transforms.placement import Places, places_of
from quant_eval.transforms.steps import Transform
from train.model.families import SITES

Buffers = dict[str, Activations]  # by what is in them


def check_spec(model: StreamedModel, spec: QuantSpec) -> None:
    """Refuse a spec that a linear's sizes do not fit, or whose transforms have no place."""
    try:
        linears = model.empty_linears().items()
        shapes = {name: (linear.out_features, linear.in_features) for name, linear in linears}
        check_linears(spec, shapes)
        places_of(spec, model.family, model.config)
    except UserError as error:
        raise UserError(f"spec {spec.name}: {error}") from None


class BlockQuantizer:
    """Quantizes one block after another for one spec.

    Args of the constructor:
        calibration: this rank's sequences as the first block reads them; advanced in place.
        contexts: what the blocks need besides, for each of its batches.
        buffers: what every block writes anew, shared by all quantizers of a walk.
        keeps_gated: whether what the MLP's last linear reads is kept until its output is computed;
            otherwise it is computed twice.
        places: of the spec's transforms.
        keep: called with every linear's codes, for methods that have them, on every rank.
        seed: of random signs and of what is learned.
    """

    def __init__(
        self,
        spec: QuantSpec,
        calibration: Activations,
        contexts: Sequence[Context],
        ranks: Ranks,
        buffers: Buffers,
        keeps_gated: bool,
        places: Places,
        keep: Keep | None = None,
        seed: int = 0,
    ) -> None:
        self.spec, self._x, self._contexts = spec, calibration, contexts
        self._ranks, self._places, self._first_seed = ranks, places, seed
        self._buffers, self._keeps_gated = buffers, keeps_gated
        self._quantize = GroupQuantizer(spec, places, ranks, keep)

    @torch.no_grad()
    def __call__(self, block: Block, library: Block | None, is_last: bool) -> list[Linear]:
        """Quantize a block in place.

        The calibration inputs are replaced by the block's outputs. `library` is the same block as
        another project's library quantized it, None for ours. No block reads the outputs of
        the last, so they are not computed.
        """
        if self.spec.folds:
            assert library is not None
            # Assigned, not copied into: the tensors are those of the full-precision block too.
            block.module.load_state_dict(library.module.state_dict(), assign=True)
            return [Linear(name=name, folded=True) for group in block.linears() for name in group]
        reads = (self._qkv_reads, self._output_reads, self._up_reads, self._down_reads)
        is_calibrated = self.spec.needs_calibration
        seed = self._seed(block)
        # Before any linear changes: the target is the full-precision block.
        learned = self._learned(block, seed)
        groups, errors = block.linears(), list[Linear]()
        theirs = library.linears() if library else [None] * len(groups)
        for site, linears, inputs, rounded in zip(SITES, groups, reads, theirs, strict=True):
            # the inputs are computed as they are read, when all groups before this are quantized
            statistics = self._statistics(linears, inputs(block)) if is_calibrated else None
            again = self._again(block, site)
            errors += self._quantize(
                block, site, linears, statistics, learned.get(site), again, rounded, seed
            )
            # From here on attention reads the cast cache: later sites are calibrated on it.
            if site == "attention_in" and self.spec.kv:
                self._cast_cache(block)
        if is_calibrated and not is_last:
            self._advance(block)
        return errors

    def _learned(self, block: Block, seed: int) -> dict[str, Transform]:
        """Return the transform of every site, where the spec learns them."""
        rotation = self.spec.rotation
        if rotation is None or not ROTATIONS[rotation].is_learned:
            return {}
        reading = next(iter(block.linears()[0].values()))
        sampled = sample(self._x, reading.in_features, reading.weight.dtype, self._ranks)
        # All sequences have one length (`QuantSpec.needs_equal_lengths`), and a rank has some.
        return learn_transforms(block, sampled, self._contexts[0], self.spec, seed, self._ranks)

    def _seed(self, block: Block) -> int:
        """Return the seed of a block's random signs and of what it learns."""
        index = int(block.prefix.rpartition(".")[2])
        state = np.random.SeedSequence([self._first_seed, index]).generate_state(1, np.uint64)
        return int(state[0] >> np.uint64(1))  # torch takes 63 bits

    def _cast_cache(self, block: Block) -> None:
        """Cast keys and values from here on, with scales from the calibration text or without."""
        from quant_eval.casts.attention import cast_cache, watch_cache

        ranges = None
        if self.spec.kv == "fp8":
            # One pass over the calibration text for the ranges alone; its outputs are not kept.
            ranges = watch_cache(block, self._places)
            for index in range(len(self._x)):
                block.attended(self._x.read(index), self._contexts[index])
            ranges.largest_2.copy_(self._ranks.max(ranges.largest_2))
        cast_cache(block, self.spec, self._places, ranges)

    def _again(self, block: Block, site: str) -> Iterator[Tensor]:
        """Compute the inputs of a site once more, when those before it are quantized."""
        attended = self._attended(block)
        # in front of the MLP, what it reads is there by now
        inputs = {
            "attention_in": lambda index: block.attention_input(self._x.read(index)),
            "attention_out": attended.read,
            "mlp_in": lambda index: block.mlp_input(self._x.read(index)),
            "mlp_out": lambda index: block.gated(self._x.read(index)),
        }
        yield from map(inputs[site], range(len(self._x)))

    def _qkv_reads(self, block: Block) -> Iterator[Tensor]:
        for index in range(len(self._x)):
            yield block.attention_input(self._x.read(index))

    def _output_reads(self, block: Block) -> Iterator[Tensor]:
        buffer = self._attended(block)
        for index in range(len(self._x)):
            attended = block.attended(self._x.read(index), self._contexts[index])
            buffer.write(index, attended)
            yield attended

    def _up_reads(self, block: Block) -> Iterator[Tensor]:
        attended, residual = self._attended(block), self._residual(block)
        for index in range(len(self._x)):
            stream, added = block.after_attention(self._x.read(index), attended.read(index))
            # In sequential blocks this overwrites x, which nothing after the attention reads.
            residual.write(index, added)
            yield block.mlp_input(stream)

    def _down_reads(self, block: Block) -> Iterator[Tensor]:
        buffer = self._gated(block)
        for index in range(len(self._x)):
            gated = block.gated(self._x.read(index))
            if buffer is not None:
                buffer.write(index, gated)
            yield gated

    def _advance(self, block: Block) -> None:
        buffer, residual = self._gated(block), self._residual(block)
        for index in range(len(self._x)):
            added = residual.read(index)
            if buffer is not None:
                gated = buffer.read(index)
            else:
                # The MLP reads the sum in a sequential block, and x in a parallel one.
                gated = block.gated(self._x.read(index) if block.is_parallel else added)
            self._x.write(index, block.after_mlp(added, gated))

    def _attended(self, block: Block) -> Activations:
        """Return the buffer of the inputs of the attention's last linear."""
        return self._buffer(block.linears()[1], "attended")

    def _gated(self, block: Block) -> Activations | None:
        """Return the buffer of the MLP's last inputs, None if they are computed twice."""
        return self._buffer(block.linears()[3], "gated") if self._keeps_gated else None

    def _residual(self, block: Block) -> Activations:
        """Return the buffer the MLP's output is added to.

        In parallel blocks that is not x, which the MLP still reads.
        """
        return self._attended(block) if block.is_parallel else self._x

    def _buffer(self, linears: Linears, name: str) -> Activations:
        width = next(iter(linears.values())).in_features
        buffer = self._buffers.pop(name, None)
        # Packed draws share their shapes; documents of another draw have other lengths.
        if buffer is None or buffer.shapes != self._x.shapes:
            buffer = None  # freed before another takes its place: there is room for one
            buffer = self._x.like(width)
        self._buffers[name] = buffer
        return buffer

    def _statistics(self, linears: Linears, inputs: Iterator[Tensor]) -> InputStatistics:
        """Return the statistics of inputs over the tokens of all ranks."""
        first = next(iter(linears.values()))
        statistics = InputStatistics(
            first.in_features, self._ranks.device, first.weight.dtype, self.spec.is_transformed
        )
        for batch in inputs:
            statistics.add(batch)
        statistics.reduce(self._ranks)
        return statistics
