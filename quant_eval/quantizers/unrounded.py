"""Weights as they are, for specs that cast activations or the KV cache alone."""

from typing import Any

from quant_eval.group import LinearGroup, RoundedGroup
from quant_eval.quantizer import CASTS, COMPRESSED, TRANSFORMS, QuantSpec


class Unrounded(QuantSpec):
    """No rounding of weights: names begin with what is cast, such as kv4."""

    method = "none"
    title = "Weights as they are"
    source = "for specs that cast activations or the KV cache alone, such as a8 and kv4"
    widths = (16,)
    is_calibrated = False
    extras = CASTS + TRANSFORMS
    saved = (COMPRESSED,)
    rounds_weights = False

    def round(self, group: LinearGroup) -> RoundedGroup:
        """Return the weights."""
        return RoundedGroup(group.weight_OI)

    def _head(self) -> tuple[str, dict[str, Any]]:
        return "", {}
