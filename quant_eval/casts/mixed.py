"""The cast of inputs some of which are kept in more bits.

`rounding.mixed` chooses them. `linear` applies the cast in place of an `ActivationCast`.

Shapes: I input features, K of them kept, R the rest.
"""

import torch
from torch import Tensor, nn

from quant_eval.casts.activations import ActivationCast, activation_cast
from quant_eval.specs import QuantSpec


def mixed_cast(spec: QuantSpec, kept_I: Tensor, width: int) -> "MixedCast | None":
    """Return a new cast of inputs of `width` features, None if the spec casts none.

    The kept inputs are cast to int8 by Atom and left alone by QUIK. Atom's integers have a scale
    per token and group of `spec.group_size`, as its weights do (arXiv:2310.19102, section 4.2);
    QUIK's one per token (arXiv:2310.09259). A static cast has one scale for the rest and
    one for what is kept.

    UserError if the format's groups do not divide the inputs that are not kept.
    """
    if spec.activations is None:
        return None
    is_atom, num_kept = spec.method == "atom", len(kept_I)
    has_groups = is_atom and spec.activations.startswith(("int", "fp8"))
    size = spec.group_size if has_groups else None
    cast_rest = activation_cast(spec, size or width - num_kept) if num_kept < width else None
    cast_kept = None
    if is_atom and num_kept:
        cast_kept = ActivationCast("int8", spec.group_size or num_kept, spec.static_activations)
    return MixedCast(kept_I, width, cast_rest, cast_kept)


class MixedCast(nn.Module):
    """Two casts of a linear's inputs, of those that are kept and of the rest.

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
        order_I = is_kept_I.argsort(stable=True)
        self.register_buffer("order_I", order_I)
        self.register_buffer("back_I", order_I.argsort())
        self._sizes = [width - len(kept_I), len(kept_I)]
        self._casts = nn.ModuleList(cast or nn.Identity() for cast in (cast_rest, cast_kept))
        self.needs_range = any(cast.needs_range for cast in self._activation_casts())

    def observe(self, x: Tensor) -> None:
        """Take calibration inputs [..., I] of this rank into account."""
        for cast, part in zip(self._casts, self._parts(x), strict=True):
            if isinstance(cast, ActivationCast) and cast.needs_range:
                cast.observe(part)

    def ranges(self) -> list[Tensor]:
        """Return what is to be reduced by max over the ranks, in place."""
        return [largest for cast in self._activation_casts() for largest in cast.ranges()]

    def fix(self) -> None:
        """End the observation. UserError if it was not finite."""
        for cast in self._activation_casts():
            cast.fix()

    def forward(self, x: Tensor) -> Tensor:
        """Return inputs [..., I] cast and back, in their dtype and order."""
        pairs = zip(self._casts, self._parts(x), strict=True)
        return torch.cat([cast(part) for cast, part in pairs], dim=-1).index_select(-1, self.back_I)

    def _activation_casts(self) -> list[ActivationCast]:
        return [cast for cast in self._casts if isinstance(cast, ActivationCast)]

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rest [..., R] and what is kept [..., K]."""
        rest_R, kept_K = x.index_select(-1, self.order_I).split(self._sizes, dim=-1)
        return rest_R, kept_K
