"""Quantizing a group of linears that read the same input: y = L Q_w(L^T W T) Q_a(T^-1 x).

Without a cast of activations L Q_w(L^T W T) T^-1 is an ordinary weight. With one, and where another
project's modules compute, the linears are replaced.

Shapes: O output features (rows), I input features.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from base.errors import UserError
from base.hessian import product_dtype, row_output_errors
from base.ranks import Ranks
from ckpt_tools.hf.measured import Linear
from quant_eval.casts.activations import ActivationCast, MixedCast, activation_cast
from quant_eval.casts.linear import CastLinear, share_inputs, shifted_bias
from quant_eval.group import LinearGroup, Rounded, RoundedGroup
from quant_eval.model.streamed import Block
from quant_eval.quantizer import QuantSpec
from quant_eval.rounding.inputs import InputStatistics
from quant_eval.transforms.fitting import fit_transform
from quant_eval.transforms.placement import Places
from quant_eval.transforms.steps import Transform
from train.model.families import SITES

Keep = Callable[[str, Rounded, Transform], None]
Linears = dict[str, nn.Linear]  # those that read one input, by their names in the model


class GroupQuantizer:
    """Quantizes one group of linears after another for one spec.

    Args of the constructor:
        places: of the transforms in a block.
        keep: called with the codes of every linear, for methods that have them, and the transform
            in whose basis they are; on every rank.
    """

    def __init__(self, spec: QuantSpec, places: Places, ranks: Ranks, keep: Keep | None) -> None:
        self._spec, self._places, self._ranks, self._keep = spec, places, ranks, keep

    def __call__(
        self,
        block: Block,
        site: str,
        linears: Linears,
        statistics: InputStatistics | None,
        transform: Transform | None,
        again: Iterable[Tensor],
        library: Linears | None,
        seed: int,
    ) -> list[Linear]:
        """Quantize linears in place and return their errors.

        Errors of outputs are those by weights alone.

        Args:
            block: the decoder block of the linears.
            site: one of SITES.
            linears: all that read one input; one Hessian serves all, since rows do not interact.
            statistics: of that input; None for specs without calibration: errors of outputs are
                then unknown.
            transform: a learned one; None: it is fitted here.
            again: this rank's inputs a second time, for casts with fixed scales.
            library: the linears as another project's library rounded them; None for ours.
            seed: of random signs.
        """
        # Rows do not interact, so one rounding with one factor serves all linears of the group.
        stacked_OI = torch.cat([linear.weight for linear in linears.values()])
        hessian_II = statistics.hessian(next(iter(linears))) if statistics else None
        is_dead = hessian_II is not None and not bool(hessian_II.diagonal().any())
        if transform is None:
            transform = self._fitted(block, site, stacked_OI, statistics, hessian_II, seed)
        signs = (seed, SITES.index(site))
        rounded = self._round(linears, stacked_OI, hessian_II, transform, library, signs)
        if rounded.modules is not None:
            for name, module in zip(linears, rounded.modules, strict=True):
                block.module.set_submodule(name.removeprefix(f"{block.prefix}."), module)
            block.mixes_sequences = self._spec.casts_inputs
            return self._errors(linears, stacked_OI, rounded.dense_OI, hessian_II, is_dead)

        dense_OI = self._restored(linears, rounded.dense_OI, transform).to(stacked_OI.dtype)
        if hessian_II is not None:
            # rounded weights multiply what the shift leaves
            hessian_II = transform.centred(hessian_II)
        errors = self._errors(linears, stacked_OI, dense_OI, hessian_II, is_dead)
        if self._spec.activations:
            cast = self._fixed(next(iter(linears)), rounded, transform, again)
            weight_OI = rounded.dense_OI.to(stacked_OI.dtype)
            self._replace(block, linears, weight_OI, transform, cast)
            return errors
        parts = dense_OI.split(_sizes(linears))
        for linear, quantized_OI in zip(linears.values(), parts, strict=True):
            # A new parameter, since the full-precision block still shares the old one.
            linear.weight = nn.Parameter(quantized_OI.clone(), requires_grad=False)
        return errors

    def _fitted(
        self,
        block: Block,
        site: str,
        weight_OI: Tensor,
        statistics: InputStatistics | None,
        hessian_II: Tensor | None,
        seed: int,
    ) -> Transform:
        """Return the transform of a site from its inputs, where they are known, and weights."""
        if not self._spec.is_transformed:
            return Transform()
        mean_I = statistics.mean() if statistics else None
        largest_I = statistics.largest(mean_I if self._spec.shift else None) if statistics else None
        return fit_transform(
            self._spec,
            site,
            self._places,
            weight_OI,
            seed,
            hessian_II=hessian_II,
            largest_I=largest_I,
            mean_I=mean_I,
            gain_I=block.gain(site),
        )

    def _round(
        self,
        linears: Linears,
        stacked_OI: Tensor,
        hessian_II: Tensor | None,
        transform: Transform,
        library: Linears | None,
        signs: tuple[int, int],
    ) -> RoundedGroup:
        """Return the stacked weights after rounding, in the basis of the transform."""
        products = product_dtype(stacked_OI.dtype)
        if self._spec.is_transformed:
            stacked_OI = self._rotated(linears, stacked_OI, transform)
            hessian_II = None if hessian_II is None else transform.hessian(hessian_II)
        theirs = [linear.weight for linear in library.values()] if library else []
        group = LinearGroup(
            name=next(iter(linears)),
            sizes=_sizes(linears),
            weight_OI=stacked_OI,
            hessian_II=hessian_II,
            products=products,
            ranks=self._ranks,
            seed=signs,
            linears=linears,
            library_OI=torch.cat(theirs) if theirs else None,
        )
        rounded = self._spec.round(group)
        if self._keep and rounded.codes:
            self._hand_over(linears, rounded.codes, transform, self._keep)
        return rounded

    def _rotated(self, linears: Linears, stacked_OI: Tensor, transform: Transform) -> Tensor:
        """Return L^T W T of every linear, stacked, in fp32."""
        parts = []
        for name, part_OI in zip(linears, stacked_OI.split(_sizes(linears)), strict=True):
            rotated_OI, output = transform.weight(part_OI.float()), self._output(name)
            parts.append(rotated_OI if output is None else output.weight(rotated_OI.T).T)
        return torch.cat(parts)

    def _restored(self, linears: Linears, rounded_OI: Tensor, transform: Transform) -> Tensor:
        """Return L W' T^-1 of every linear, stacked: the weights in the model's own basis."""
        if not self._spec.is_transformed:
            return rounded_OI
        parts = []
        # in float64, so that a saved checkpoint gives the same bits on another device
        for name, part_OI in zip(linears, rounded_OI.double().split(_sizes(linears)), strict=True):
            output = self._output(name)
            parts.append(part_OI if output is None else output.restored(part_OI.T).T)
        return transform.restored(torch.cat(parts)).float()

    def _output(self, name: str) -> Transform | None:
        """Return L of a linear, by its name in the model."""
        output = self._places.output(name)
        return output and output.to(self._ranks.device)

    def _hand_over(
        self, linears: Linears, rounded: Rounded, transform: Transform, keep: Keep
    ) -> None:
        sizes, groups_I = _sizes(linears), rounded.groups_I.cpu()
        stacked = (rounded.codes_OI, rounded.scales_OG, rounded.zeros_OG)
        parts = [part.cpu().split(sizes) for part in stacked]
        for key, codes_OI, scales_OG, zeros_OG in zip(linears, *parts, strict=True):
            changed = {"codes_OI": codes_OI, "scales_OG": scales_OG, "zeros_OG": zeros_OG}
            keep(f"{key}.weight", replace(rounded, groups_I=groups_I, **changed), transform)

    def _fixed(
        self, name: str, rounded: RoundedGroup, transform: Transform, again: Iterable[Tensor]
    ) -> ActivationCast | MixedCast:
        """Return the cast of inputs in the basis of the transform, its scales fixed."""
        cast = rounded.cast or activation_cast(self._spec, rounded.dense_OI.shape[1])
        assert cast is not None
        cast.to(self._ranks.device)
        if cast.needs_range:
            for batch in again:
                cast.observe(transform.inputs(batch))
            # Fixed on the range of all ranks, so that every rank has the same scale.
            for largest in cast.ranges():
                largest.copy_(self._ranks.max(largest))
            cast.fix(name)
        return cast

    def _replace(
        self,
        block: Block,
        linears: Linears,
        rounded_OI: Tensor,
        transform: Transform,
        cast: ActivationCast | MixedCast,
    ) -> None:
        """Replace the linears by `CastLinear`, in the basis of the transform."""
        replacements = []
        parts = rounded_OI.split(_sizes(linears))
        for (name, linear), part_OI in zip(linears.items(), parts, strict=True):
            bias = shifted_bias(linear.weight, linear.bias, transform)
            replacement = CastLinear(part_OI.clone(), bias, transform, cast, self._output(name))
            block.module.set_submodule(name.removeprefix(f"{block.prefix}."), replacement)
            replacements.append(replacement)
        share_inputs(replacements)

    def _errors(
        self,
        linears: Linears,
        weight_OI: Tensor,
        quantized_OI: Tensor,
        hessian_II: Tensor | None,
        is_dead: bool = False,
    ) -> list[Linear]:
        """Return the errors of stacked linears, of which each rank computes a share of the rows."""
        share = self._ranks.share(len(weight_OI))
        rows = slice(share.start, share.stop)
        difference_OI = weight_OI[rows].double() - quantized_OI[rows].double()
        sums = [difference_OI.square().sum(1), weight_OI[rows].double().square().sum(1)]
        if hessian_II is not None:
            sums += row_output_errors(weight_OI[rows], quantized_OI[rows], hessian_II)
        sums_OE = self._ranks.gather(torch.stack(sums, dim=1), len(weight_OI))
        errors = []
        for name, rows_OE in zip(linears, sums_OE.split(_sizes(linears)), strict=True):
            # Columns are pairs of an error and its reference: of weights, then of outputs.
            pairs = rows_OE.sum(0).view(-1, 2).tolist()
            weight, *output = [_relative(error, total, name) for error, total in pairs]
            errors.append(
                Linear(
                    name=name,
                    relative_output_error=output[0] if output else None,
                    relative_weight_error=weight,
                    dead=is_dead,
                )
            )
        return errors


def _sizes(linears: Linears) -> list[int]:
    return [linear.out_features for linear in linears.values()]


def _relative(error: float, total: float, name: str) -> float:
    """Return error / total, or 0 for a linear of zeros, which is rounded to zeros."""
    if error and not total:
        raise UserError(
            f"{name}: its output is 0 on all of the calibration text; check the checkpoint's"
            " weights"
        )
    return error / total if total else 0.0
