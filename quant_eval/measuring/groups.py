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
from base.ranks import Ranks
from base.rounding.gptq import row_output_errors
from base.rounding.grid import Rounded
from base.rounding.hessian import product_dtype
from ckpt_tools.hf.measured import Linear
from quant_eval.casts.activations import ActivationCast, activation_cast
from quant_eval.casts.linear import CastLinear, share_inputs, shifted_bias
from quant_eval.casts.mixed import MixedCast, mixed_cast
from quant_eval.model.families import SITES
from quant_eval.model.streamed import Block
from quant_eval.rounding.inputs import InputStatistics
from quant_eval.rounding.mixed import Mixed
from quant_eval.rounding.rows import round_weight
from quant_eval.rounding.trellis import qtip
from quant_eval.specs import QuantSpec
from quant_eval.transforms.fitting import GroupStatistics, fit_transform
from quant_eval.transforms.placement import Places
from quant_eval.transforms.steps import Transform, compose

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
            library: the linears as another project's library rounded them; None for own methods.
            seed: of random signs.
        """
        stacked_OI = torch.cat([linear.weight for linear in linears.values()])
        hessian_II = statistics.hessian(next(iter(linears))) if statistics else None
        is_dead = hessian_II is not None and not bool(hessian_II.diagonal().any())
        if self._spec.method == "int8":
            return self._errors(linears, stacked_OI, self._int8(block, linears), hessian_II)
        if transform is None:
            transform = self._fitted(block, site, stacked_OI, statistics, hessian_II, seed)
        signs = (seed, SITES.index(site))
        rounded_OI, kept_I = self._round(linears, stacked_OI, hessian_II, transform, library, signs)
        dense_OI = self._restored(linears, rounded_OI, transform).to(stacked_OI.dtype)
        if hessian_II is not None:
            # rounded weights multiply what the shift leaves
            hessian_II = transform.centred(hessian_II)
        errors = self._errors(linears, stacked_OI, dense_OI, hessian_II, is_dead)
        if self._spec.activations:
            cast = self._cast_of(rounded_OI.shape[1], kept_I, transform, again)
            self._replace(block, linears, rounded_OI.to(stacked_OI.dtype), transform, cast)
            return errors
        parts = dense_OI.split(_sizes(linears))
        for linear, quantized_OI in zip(linears.values(), parts, strict=True):
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
            return compose()
        mean_I = statistics.mean() if statistics else None
        largest_I = statistics.largest(mean_I if self._spec.shift else None) if statistics else None
        of_group = GroupStatistics(hessian_II, largest_I, mean_I, weight_OI, block.gain(site))
        return fit_transform(self._spec, site, self._places, of_group, seed)

    def _round(
        self,
        linears: Linears,
        stacked_OI: Tensor,
        hessian_II: Tensor | None,
        transform: Transform,
        library: Linears | None,
        seed: tuple[int, int],
    ) -> tuple[Tensor, Tensor | None]:
        """Return the stacked weights after rounding, in the basis of the transform.

        With them the inputs that Atom and QUIK keep in more bits; None for other methods.
        """
        spec = self._spec
        if library is not None:
            return torch.cat([linear.weight for linear in library.values()]), None
        if spec.method == "nf4":
            from quant_eval.libraries.bitsandbytes import nf4_dense

            assert spec.group_size is not None
            return nf4_dense(stacked_OI, spec.group_size), None

        # own methods round in the basis of the transform
        products = product_dtype(stacked_OI.dtype)
        if spec.is_transformed:
            stacked_OI = self._rotated(linears, stacked_OI, transform)
            hessian_II = None if hessian_II is None else transform.hessian(hessian_II)
        if spec.method == "none":
            return stacked_OI, None

        name = next(iter(linears))  # for messages
        if spec.method == "qtip":
            assert hessian_II is not None
            sizes = _sizes(linears)
            return qtip(
                stacked_OI, hessian_II, spec, seed, name, products, sizes, self._ranks
            ), None
        rounded = round_weight(stacked_OI, hessian_II, products, spec, name, self._ranks)
        if isinstance(rounded, Mixed):
            return rounded.dense(), rounded.kept_I
        if self._keep:
            self._hand_over(linears, rounded, transform, self._keep)
        return rounded.dense(), None

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
            own = {"codes_OI": codes_OI, "scales_OG": scales_OG, "zeros_OG": zeros_OG}
            keep(f"{key}.weight", replace(rounded, groups_I=groups_I, **own), transform)

    def _cast_of(
        self, width: int, kept_I: Tensor | None, transform: Transform, again: Iterable[Tensor]
    ) -> ActivationCast | MixedCast:
        """Return the cast of inputs in the basis of the transform, its scales fixed."""
        spec = self._spec
        cast = activation_cast(spec, width) if kept_I is None else mixed_cast(spec, kept_I, width)
        assert cast is not None
        cast.to(self._ranks.device)
        if cast.needs_range:
            for batch in again:
                cast.observe(transform.inputs(batch))
            for largest in cast.ranges():
                largest.copy_(self._ranks.max(largest))
            cast.fix()
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

    def _int8(self, block: Block, linears: Linears) -> Tensor:
        """Replace the linears by LLM.int8()'s own modules, and return their decoded weights."""
        from quant_eval.libraries.bitsandbytes import dense_weight, replace_linears

        relative = [name.removeprefix(f"{block.prefix}.") for name in linears]
        replace_linears(block.module, relative, self._spec)
        block.mixes_sequences = True
        return torch.cat([dense_weight(block.module.get_submodule(name)) for name in relative])

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
        own = slice(share.start, share.stop)
        difference_OI = weight_OI[own].double() - quantized_OI[own].double()
        sums = [difference_OI.square().sum(1), weight_OI[own].double().square().sum(1)]
        if hessian_II is not None:
            sums += row_output_errors(weight_OI[own], quantized_OI[own], hessian_II)
        sums_OE = self._ranks.gather(torch.stack(sums, dim=1), len(weight_OI))
        errors = []
        for name, rows_OE in zip(linears, sums_OE.split(_sizes(linears)), strict=True):
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
