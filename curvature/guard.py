"""The start-up guard: a Hessian-vector product is compared with finite differences before anything is measured.

A wrong product is usually silent: it has the right shape and size, and every number made from it looks plausible.

Shapes: B sequences, S positions of a sequence, P parameters.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from curvature.olmo2 import HessianProduct
from curvature.parameters import Parameters
from train.command import UserError

LOSS_LIMIT = 1e-5  # fp32 losses of two forward codes agree to about 1e-7
PRODUCT_LIMIT = 0.01  # fp32 differences of gradients give Hv to about 2e-4

Product = Callable[[Tensor, Tensor], HessianProduct]


def check_product(
    product: Product, reference: Product, parameters: Parameters, tokens_BS1: Tensor, v_P: Tensor
) -> dict[str, Any]:
    """Relative differences of loss and Hv from the reference, on one batch and one probe.

    The loss is compared as |L - L_ref| / |L_ref|, the product as |Hv - Hv_ref| / |Hv_ref| over all parameters. The
    tensor whose own part differs most is named, but not judged: where Hv nearly vanishes, rounding decides.

    Raises:
        UserError: one of them is above its limit, or not a number.
    """
    measured, expected = product(tokens_BS1, v_P), reference(tokens_BS1, v_P)
    loss_difference = abs(measured.loss - expected.loss) / abs(expected.loss)
    norm = float(expected.hv_P.norm())
    difference = float((measured.hv_P - expected.hv_P).norm()) / norm
    if not loss_difference <= LOSS_LIMIT:
        raise UserError(
            f"refusing to measure: the product's loss is {measured.loss:.8g}, the model's own {expected.loss:.8g} "
            f"(relative difference {loss_difference:.2g}, limit {LOSS_LIMIT:g}); the other --route may know this model"
        )
    if not difference <= PRODUCT_LIMIT:
        raise UserError(
            f"refusing to measure: |Hv| is {float(measured.hv_P.norm()):.6g}, by finite differences {norm:.6g} "
            f"(relative difference of the vectors {difference:.2g}, limit {PRODUCT_LIMIT:g}); check the checkpoint"
        )
    return {
        "loss_relative_difference": loss_difference,
        "loss_limit": LOSS_LIMIT,
        "product_relative_difference": difference,
        "product_limit": PRODUCT_LIMIT,
        "worst_tensor": _worst_tensor(parameters, measured.hv_P, expected.hv_P),
    }


def _worst_tensor(parameters: Parameters, measured_P: Tensor, expected_P: Tensor) -> dict[str, Any]:
    measured, expected = parameters.split(measured_P), parameters.split(expected_P)
    differences = {
        name: float((measured[name] - part).norm() / part.norm()) for name, part in expected.items() if part.any()
    }
    name = max(differences, key=differences.__getitem__)
    return {"name": name, "relative_difference": differences[name]}
