"""The transform of a group of linears that read the same input, from the group's statistics.

`measuring.groups` calls `fit_transform`; learned transforms are in `learned`.

Shapes: O output features, I input features.
"""

from typing import TYPE_CHECKING, assert_never

from torch import Tensor

from base.errors import UserError
from base.hessian import check_finite
from quant_eval.transforms.duquant import duquant_steps
from quant_eval.transforms.hadamard import hadamard_steps
from quant_eval.transforms.placement import RESIDUAL_SIGNS, Place, Places
from quant_eval.transforms.steps import Diagonal, Transform, TransformStep
from train.model.families import SITES

if TYPE_CHECKING:
    from quant_eval.quantizer import QuantSpec


def fit_transform(
    spec: "QuantSpec",
    site: str,
    places: Places,
    weight_OI: Tensor,
    seed: int,
    *,
    hessian_II: Tensor | None = None,
    largest_I: Tensor | None = None,
    mean_I: Tensor | None = None,
    gain_I: Tensor | None = None,
) -> Transform:
    """Return the transform of a site: shift, then smoothing, then rotation.

    The shift is the mean of the inputs, which BASE-Q (arXiv:2506.15689) takes off before a cast and
    adds again as the bias W b. Of that paper this is the bias correction alone: not its asymmetric
    scaling, nor what it learns by blocks.

    Args:
        spec: which transforms; learned rotations are not fitted here.
        site: one of SITES.
        places: of the model's blocks, which say what rotates the site.
        weight_OI: fp32, the linears that read the site, stacked along O.
        seed: of a block's own random signs.
        hessian_II: float64, the mean of x x^T over the calibration tokens; this and what follows
            may be None where the spec does not need it.
        largest_I: max|x|; where the spec shifts, max|x - mean|.
        mean_I: of x.
        gain_I: of the norm before the site, where `Place.folds_gain`.

    Returns:
        The transform on the device of the weights, the identity if nothing is transformed.

    Raises:
        UserError: a gain that is to be folded is 0, or an input that is to be smoothed not finite.
    """
    assert mean_I is not None or not spec.shift
    shift_I = mean_I if spec.shift else None
    steps: list[TransformStep] = []
    if spec.smooth is not None:
        assert largest_I is not None
        steps.append(smoothing(largest_I, weight_OI, spec.smooth, site))
    place = places.sites[site]
    if place.folds_gain:
        # T = diag(g) Q: the inverse takes the gain off the inputs, and the weights receive it.
        steps.append(_gain(gain_I, site))
    match place.kind:
        case "none":
            pass
        case "hadamard":
            steps += hadamard_steps(place.width, place.block, _seed(place, site, seed), place.kept)
        case "duquant":
            assert hessian_II is not None
            assert place.block is not None
            # The rotations are fitted to what they will read: inputs that are shifted and smoothed.
            before = Transform(*steps, shift_I=shift_I)
            steps += duquant_steps(before.hessian(hessian_II), place.block)
        case _:
            assert_never(place.kind)
    return Transform(*steps, shift_I=shift_I).to(weight_OI.device)


def smoothing(largest_I: Tensor, weight_OI: Tensor, alpha: float, site: str) -> Diagonal:
    """Return SmoothQuant's scales (arXiv:2211.10438, eq. 4): inputs are divided by them.

    max|x_i|^alpha / max|w_i|^(1 - alpha) of input feature i, the latter over all rows; 1 where the
    feature or all of its weights are 0.

    Args:
        largest_I: max|x| of every input feature.
        weight_OI: of all linears that read the inputs, stacked.
        alpha: how much of the spread the weights take, from 0 to 1.
        site: whose inputs they are, for messages.

    Raises:
        UserError: an input was not finite.

    Example: half of an input's outlier, on the log scale, moves into the weights.
        >>> import torch
        >>> largest_I = torch.tensor([16.0, 1.0])
        >>> smoothing(largest_I, torch.ones(2, 2), 0.5, "mlp_in").factors_I.tolist()
        [4.0, 1.0]
    """
    check_finite(largest_I, site)
    inputs_I, weights_I = largest_I.double(), weight_OI.abs().amax(0).double()
    scales_I = inputs_I**alpha / weights_I ** (1 - alpha)
    return Diagonal(scales_I.where((inputs_I > 0) & (weights_I > 0), 1.0))


def _gain(gain_I: Tensor | None, site: str) -> Diagonal:
    assert gain_I is not None, "the place folds the gain of a norm"
    if bool((gain_I == 0).any()):
        raise UserError(f"a gain of 0 before {site} cannot be folded; give quarot")
    return Diagonal(gain_I)


def _seed(place: Place, site: str, seed: int) -> list[int] | None:
    """Return the seed of the random signs of a site, None if it has none."""
    if place.signs == "none":
        return None
    return [RESIDUAL_SIGNS] if place.signs == "residual" else [seed, SITES.index(site)]
