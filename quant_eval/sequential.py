"""The walk through a decoder block: every linear is quantized on the inputs that the quantized ones before it produce.

Shapes: B sequences, L tokens of a sequence, D hidden features, O output features, I input features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_tools.ranks import Ranks
from quant_eval.activations import Activations
from quant_eval.gptq import gptq, prepare, row_output_errors
from quant_eval.grid import Rounded, round_to_nearest
from quant_eval.hessian import InputHessian
from quant_eval.specs import QuantSpec
from quant_eval.streamed import Block, StreamedModel
from train.command import UserError

Keep = Callable[[str, Rounded], None]
FOLDING = ("awq",)  # methods that move scales between linears: what one linear puts out means nothing by itself


@dataclass(frozen=True)
class LinearError:
    """A quantized linear.

    Attributes:
        name: in the model.
        relative_output_error: GPTQ's objective tr(dW H dW^T) / tr(W H W^T) with the H of the inputs it was
            quantized on.
        relative_weight_error: ||dW||_F^2 / ||W||_F^2.
        folded: whether scales were moved into other linears, which leaves both errors without meaning, and null.
    """

    name: str
    relative_output_error: float | None
    relative_weight_error: float | None
    folded: bool = False


def check_groups(model: StreamedModel, spec: QuantSpec) -> None:
    """UserError if the group size does not divide the input features of every linear."""
    for name, linear in model.empty_linears().items():
        if spec.group_size is not None and linear.in_features % spec.group_size:
            raise UserError(
                f"spec {spec.name}: group size {spec.group_size} does not divide the {linear.in_features} input "
                f"features of {name}; choose a divisor, or perchannel"
            )


class BlockQuantizer:
    """Quantizes one block after another for one spec.

    Args of the constructor:
        calibration: this rank's sequences as the first block reads them; advanced in place.
        contexts: per batch, what the blocks need besides.
        keep: called with every linear's codes, for methods that have them, on every rank.
    """

    def __init__(
        self,
        spec: QuantSpec,
        calibration: Activations,
        contexts: list[dict[str, Any]],
        ranks: Ranks,
        keep: Keep | None = None,
    ) -> None:
        self.spec, self.errors = spec, list[LinearError]()
        self._calibration, self._contexts, self._ranks, self._keep = calibration, contexts, ranks, keep
        self._attended: Activations | None = None

    @torch.no_grad()
    def __call__(self, block: Block, given: Block | None, is_last: bool) -> None:
        """Quantizes a block in place; its calibration inputs become its outputs.

        Args:
            block: full precision.
            given: the same block with the weights that another project's library made; None for own methods.
            is_last: no block reads the outputs, so they are not computed.

        Raises:
            UserError: a Hessian cannot be used at the stated damping, or the method does not take a weight's shape.
        """
        if self.spec.method in FOLDING:
            assert given is not None
            block.module.load_state_dict(given.module.state_dict(), assign=True)
            names = [name for group in block.linears() for name in group]
            self.errors += [LinearError(name, None, None, folded=True) for name in names]
            return
        x, contexts, device = self._calibration, self._contexts, self._ranks.device
        groups, library = block.linears(), list(given.linears()) if given else None

        def quantize(number: int, inputs: Callable[[int], Tensor]) -> None:
            hessian = InputHessian(next(iter(groups[number].values())).in_features, device)
            for index in range(len(x)):
                hessian.add(inputs(index))
            hessian_II = self._mean(hessian, next(iter(groups[number])))
            del hessian  # the widest takes 1 GB at 7B
            self._quantize_group(block, groups[number], hessian_II, library[number] if library else None)

        quantize(0, lambda index: block.attention_input(x.read(index, device)))
        attended = self._attended = self._attended or x.like(next(iter(groups[1].values())).in_features)

        def attend(index: int) -> Tensor:
            made = block.attended(x.read(index, device), contexts[index])
            attended.write(index, made)
            return made

        quantize(1, attend)
        streams = [x, attended] if block.is_parallel else [x]

        def read_by_mlp(index: int) -> Tensor:
            stream, added = block.after_attention(x.read(index, device), attended.read(index, device))
            streams[-1].write(index, added)
            return block.mlp_input(stream)

        quantize(2, read_by_mlp)
        # computed twice rather than kept: these are the widest of all, and would double what is in memory
        quantize(3, lambda index: block.gated(x.read(index, device)))
        for index in range(0 if is_last else len(x)):
            gated = block.gated(x.read(index, device))
            x.write(index, block.after_mlp(streams[-1].read(index, device), gated))

    def _mean(self, hessian: InputHessian, name: str) -> Tensor:
        """Over the tokens of all ranks."""
        self._ranks.sum(hessian.sum_II)
        hessian.tokens = int(self._ranks.sum(torch.tensor(hessian.tokens)))
        return hessian.mean(name)

    def _quantize_group(
        self, block: Block, linears: dict[str, nn.Linear], hessian_II: Tensor, given: dict[str, nn.Linear] | None
    ) -> None:
        """Quantizes linears that read the same input. One Hessian serves all: rows do not interact."""
        if self.spec.method == "int8":
            from quant_eval.libraries.bitsandbytes import dense_weight, replace_linears

            before_OI = torch.cat([linear.weight for linear in linears.values()])
            relative = {key: key.removeprefix(f"{block.prefix}.") for key in linears}
            replace_linears(block.module, list(relative.values()), self.spec)
            block.mixes_sequences = True
            decoded_OI = torch.cat([dense_weight(block.module.get_submodule(key)) for key in relative.values()])
            self._record(linears, before_OI, decoded_OI, hessian_II)
            return
        stacked_OI = torch.cat([linear.weight for linear in linears.values()])
        if given is not None:
            dense_OI = torch.cat([linear.weight for linear in given.values()])
        elif self.spec.method == "nf4":
            from quant_eval.libraries.bitsandbytes import nf4_dense

            assert self.spec.group_size is not None
            dense_OI = nf4_dense(stacked_OI, self.spec.group_size)
        else:
            rounded = self._round(stacked_OI, hessian_II, next(iter(linears)))
            dense_OI = rounded.dense()
            if self._keep:
                _hand_on(rounded, linears, self._keep)
        dense_OI = dense_OI.to(stacked_OI.dtype)
        self._record(linears, stacked_OI, dense_OI, hessian_II)
        sizes = [linear.out_features for linear in linears.values()]
        for linear, quantized_OI in zip(linears.values(), dense_OI.split(sizes), strict=True):
            linear.weight = nn.Parameter(quantized_OI.clone(), requires_grad=False)

    def _record(
        self, linears: dict[str, nn.Linear], weight_OI: Tensor, quantized_OI: Tensor, hessian_II: Tensor
    ) -> None:
        """Notes the errors of linears whose rows are stacked; each rank works out its share of the rows."""
        share = self._ranks.share(len(weight_OI))
        own = slice(share.start, share.stop)
        sums_O4 = torch.zeros(len(weight_OI), 4, dtype=torch.float64, device=weight_OI.device)
        output_errors = row_output_errors(weight_OI[own], quantized_OI[own], hessian_II)
        difference_OI = weight_OI[own].double() - quantized_OI[own].double()
        squares = (difference_OI.square().sum(1), weight_OI[own].double().square().sum(1))
        sums_O4[own] = torch.stack([*output_errors, *squares], dim=1)
        sizes = [linear.out_features for linear in linears.values()]
        for name, rows_O4 in zip(linears, self._ranks.sum(sums_O4).split(sizes), strict=True):
            output, whole, weight, norm = rows_O4.sum(0).tolist()
            self.errors.append(LinearError(name, _relative(output, whole, name), _relative(weight, norm, name)))

    def _round(self, weight_OI: Tensor, hessian_II: Tensor, name: str) -> Rounded:
        """Each rank rounds its share of the rows; all get all of them."""
        ranks, rows = self._ranks, len(weight_OI)
        share = ranks.share(rows)
        own_OI = weight_OI[share.start : share.stop]
        # a Hessian that is refused is refused on every rank
        prepared = prepare(hessian_II, self.spec, name) if self.spec.method == "gptq" else None
        try:
            own = gptq(own_OI, prepared, self.spec) if prepared else round_to_nearest(own_OI, self.spec)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        if ranks.size == 1:
            return own

        def gathered(part: Tensor) -> Tensor:
            whole = part.new_zeros(rows, part.shape[1])
            whole[share.start : share.stop] = part
            return ranks.sum(whole)

        return Rounded(gathered(own.codes_OI), gathered(own.scales_OG), gathered(own.zeros_OG), own.groups_I)


def _hand_on(rounded: Rounded, linears: dict[str, nn.Linear], keep: Keep) -> None:
    sizes = [linear.out_features for linear in linears.values()]
    parts = [part.cpu().split(sizes) for part in (rounded.codes_OI, rounded.scales_OG, rounded.zeros_OG)]
    for key, codes_OI, scales_OG, zeros_OG in zip(linears, *parts, strict=True):
        keep(f"{key}.weight", Rounded(codes_OI, scales_OG, zeros_OG, rounded.groups_I.cpu()))


def _relative(error: float, whole: float, name: str) -> float:
    """Their ratio; 0 for a linear of zeros, which is rounded to zeros."""
    if error and not whole:
        raise UserError(f"{name}: nothing comes out of it on the calibration text; check the checkpoint's weights")
    return error / whole if whole else 0.0
