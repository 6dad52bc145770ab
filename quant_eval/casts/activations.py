"""The cast of a linear's inputs to few bits and back, by compressed-tensors' presets.

`linear` applies it.

Shapes: N tokens, I input features, K of them kept in more bits, R the rest.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from base.errors import UserError
from quant_eval.numbers import E2M1, E5M2
from quant_eval.quantizer import QuantSpec
from quant_eval.sizes import check_cast

if TYPE_CHECKING:  # it takes seconds to import
    from compressed_tensors.quantization import QuantizationArgs

PRESETS = {
    "fp8": "FP8_DYNAMIC",
    "mxfp8": "MXFP8",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
}


def activation_cast(spec: QuantSpec, width: int) -> "ActivationCast | None":
    """Return a new cast of inputs of `width` features, None if the spec casts none.

    UserError if the format's groups do not divide the width.
    """
    if spec.activations is None:
        return None
    return ActivationCast(spec.activations, width, spec.static_activations)


class ActivationCast(nn.Module):
    """Inputs rounded to a number format and back, each token by itself.

    Scales are made on the spot, of a token or of groups of its features, as in compressed-tensors'
    presets: intB symmetric with max|x| at 2^(B-1) - 1/2 steps, FP8 with it at the largest number,
    MXFP and NVFP4 by groups. A static cast has one scale for all tokens, and NVFP4 one besides
    those of the groups: from max|x| over all that was observed. As there, all is computed in the
    inputs' dtype. compressed-tensors has no E5M2: it is cast here by the rule of its E4M3.

    A cast with a part that is static is given calibration inputs by `observe`; then the caller
    reduces `ranges` over the ranks and calls `fix`.

    Attributes:
        args: compressed-tensors' description; None for E5M2.
        needs_range: whether it has to be fixed before use.
    """

    largest: Tensor

    def __init__(self, format: str, width: int, is_static: bool = False) -> None:
        super().__init__()
        assert not is_static or format.startswith(("int", "fp8"))
        self.width, self.is_static = width, is_static
        self.args = None if format == "fp8e5m2" else cast_args(format, is_static)
        check_cast(format, width)
        self.needs_range = is_static or format == "nvfp4"
        self._is_fixed = not self.needs_range
        self.register_buffer("largest", torch.zeros(1))

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Take calibration inputs [..., I] of this rank into account."""
        assert self.needs_range
        assert not self._is_fixed
        largest = x.abs().amax().float()
        # infinity is sure to survive a maximum over ranks, NaN is not
        largest = largest.masked_fill(largest.isnan(), torch.inf)
        self.largest = self.largest.to(x.device).maximum(largest)

    def ranges(self) -> list[Tensor]:
        """Return what is to be reduced by max over the ranks, in place."""
        return [self.largest] if self.needs_range else []

    def fix(self, name: str) -> None:
        """End the observation. UserError with the linear's `name` if it gives no scale."""
        assert self.needs_range
        instead = "the spec without -astatic, which scales each token's own"
        if not self.is_static:
            instead = "mxfp4, which scales each group's own"
        check_largest(self.largest, f"{name}: its inputs", instead)
        self._is_fixed = True

    def forward(self, x: Tensor) -> Tensor:
        """Return inputs [..., I] cast and back, in their dtype."""
        assert self._is_fixed, "a static cast is used before it is fixed"
        tokens_NI = x.reshape(-1, self.width)
        cast_NI = self._e5m2(tokens_NI) if self.args is None else self._cast(tokens_NI, self.args)
        return cast_NI.view(x.shape)

    def scale(self, dtype: torch.dtype) -> Tensor:
        """Return the scale of all inputs of a dtype: static, or NVFP4's global one, [1]."""
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

        assert self._is_fixed
        assert self.needs_range
        largest = self.largest.to(dtype)
        if self.args is None:
            return _e5m2_scale(largest)
        scale: Tensor
        if self.is_static:
            scale = calculate_qparams(-largest, largest, self.args)[0]
        else:
            scale = generate_gparam(-largest, largest)
        return scale

    @torch.no_grad()
    def _cast(self, tokens_NI: Tensor, args: "QuantizationArgs") -> Tensor:
        """Cast by compressed-tensors, which takes the second dimension for that of tokens."""
        from compressed_tensors.quantization.lifecycle.forward import fake_quantize
        from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

        x_1NI, global_scale = tokens_NI[None], None
        if self.is_static:
            scale, zero = self.scale(x_1NI.dtype), None
        else:
            global_scale = self.scale(x_1NI.dtype) if self.needs_range else None
            scale, zero = compute_dynamic_scales_and_zp(x_1NI, args, self, global_scale)
        if args.num_bits == 4 and args.type == "float":
            return _e2m1(tokens_NI, scale[0], global_scale)
        cast_1NI: Tensor = fake_quantize(x_1NI, scale, zero, args, global_scale)
        return cast_1NI[0]

    @torch.no_grad()
    def _e5m2(self, tokens_NI: Tensor) -> Tensor:
        if self.is_static:
            scale = self.scale(tokens_NI.dtype)
        else:
            scale = _e5m2_scale(tokens_NI.abs().amax(1, keepdim=True))
        # torch makes infinity of anything beyond the largest number of E5M2.
        limited_NI = (tokens_NI / scale).clamp(-E5M2.largest, E5M2.largest)
        return limited_NI.to(E5M2.dtype).to(tokens_NI.dtype) * scale


class MixedCast(nn.Module):
    """Two casts of a linear's inputs, of those that are kept in more bits and of the rest.

    `quantizers.mixed` makes it, in place of an `ActivationCast`.

    Args of the constructor:
        kept_I: int64, the input features that are kept.
        width: of all input features.
        cast_rest, cast_kept: of their inputs in natural order; None casts nothing. The width of
            one is that of all its inputs, or of a group of them that has scales of its own.

    Attributes:
        needs_range: as those of `ActivationCast`, and so are the methods.
    """

    order_I: Tensor
    back_I: Tensor

    def __init__(
        self,
        kept_I: Tensor,
        width: int,
        cast_rest: ActivationCast | None,
        cast_kept: ActivationCast | None,
    ) -> None:
        super().__init__()
        is_kept_I = torch.zeros(width, dtype=torch.int32, device=kept_I.device)
        is_kept_I[kept_I] = 1
        # The rest first, then what is kept, both in natural order: as `rounding.mixed` has them.
        order_I = is_kept_I.argsort(stable=True)
        self.register_buffer("order_I", order_I)
        self.register_buffer("back_I", order_I.argsort())
        self._sizes = [width - len(kept_I), len(kept_I)]
        self._casts = nn.ModuleList(cast or nn.Identity() for cast in (cast_rest, cast_kept))
        self.needs_range = bool(self._observing())

    def observe(self, x: Tensor) -> None:
        """Take calibration inputs [..., I] of this rank into account."""
        for cast, part in zip(self._casts, self._parts(x), strict=True):
            if isinstance(cast, ActivationCast) and cast.needs_range:
                cast.observe(part)

    def ranges(self) -> list[Tensor]:
        """Return what is to be reduced by max over the ranks, in place."""
        return [largest for cast in self._observing() for largest in cast.ranges()]

    def fix(self, name: str) -> None:
        """End the observation. UserError with the linear's `name` if it gives no scale."""
        for cast in self._observing():
            cast.fix(name)

    def forward(self, x: Tensor) -> Tensor:
        """Return inputs [..., I] cast and back, in their dtype and order."""
        pairs = zip(self._casts, self._parts(x), strict=True)
        return torch.cat([cast(part) for cast, part in pairs], dim=-1).index_select(-1, self.back_I)

    def _observing(self) -> list[ActivationCast]:
        """Return the casts that take calibration inputs."""
        casts = [cast for cast in self._casts if isinstance(cast, ActivationCast)]
        return [cast for cast in casts if cast.needs_range]

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rest [..., R] and what is kept [..., K]."""
        rest_R, kept_K = x.index_select(-1, self.order_I).split(self._sizes, dim=-1)
        return rest_R, kept_K


def check_largest(largest: Tensor, name: str, instead: str) -> None:
    """Raise UserError if the largest |x| of a calibration text gives no scale: 0, or not finite.

    Args:
        largest: [1] or a scalar.
        name: what x is, in the plural.
        instead: what to give instead, which needs no scale from a text.
    """
    # Written so that NaN is refused too.
    if not 0 < float(largest) < torch.inf:
        raise UserError(
            f"{name} are at most {float(largest):g} on the calibration text; check the checkpoint's"
            f" weights, or give {instead}"
        )


def _e2m1(tokens_NI: Tensor, scale_NG: Tensor, global_scale: Tensor | None) -> Tensor:
    """Round to E2M1 as `fake_quantize` does.

    On a CPU its eight masks take six times as long.
    """
    if global_scale is not None:
        scale_NG = scale_NG / global_scale
    scale_NG1 = scale_NG[..., None]
    groups_NGK = tokens_NI.unflatten(1, (scale_NG.shape[1], -1))
    numbers_NGK = E2M1.nearest(groups_NGK / scale_NG1).to(scale_NG.dtype)
    return (numbers_NGK * scale_NG1).flatten(1).to(tokens_NI.dtype)


def _e5m2_scale(largest: Tensor) -> Tensor:
    """Return max|x| / 57344, or the smallest step of the dtype where that is 0."""
    scale = largest / E5M2.largest
    return scale.masked_fill(scale == 0, torch.finfo(scale.dtype).eps)


def cast_args(format: str, is_static: bool) -> "QuantizationArgs":
    """Return the preset's description of activations, at the width of an integer format."""
    from compressed_tensors.quantization import preset_name_to_scheme

    preset = "W8A8" if format.startswith("int") else PRESETS[format]
    args = preset_name_to_scheme(preset, ["Linear"]).input_activations
    changes: dict[str, Any] = {}
    if format.startswith("int"):
        changes["num_bits"] = int(format.removeprefix("int"))
    if is_static:
        changes |= {"strategy": "tensor", "dynamic": False}
    return args.model_copy(update=changes)
