"""Numbers of small float formats from their bits, and the nearest by a search: a slow witness."""

import math

import numpy as np

from quant_eval.numbers import E2M1, E4M3, E5M2, Numbers

# bits of the exponent and of the mantissa
LAYOUTS: dict[str, tuple[Numbers, int, int]] = {
    "e2m1": (E2M1, 2, 1),
    "e4m3": (E4M3, 4, 3),
    "e5m2": (E5M2, 5, 2),
}


def number(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The number of a code, from its sign, exponent and mantissa."""
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = (code >> mantissa_bits) % 2**exponent_bits
    mantissa = code % 2**mantissa_bits / 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent_bits == 5 and exponent == 31:
        return sign * math.inf if mantissa == 0 else math.nan
    if exponent_bits == 4 and exponent == 15 and mantissa == 7 / 8:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias)
    return sign * (1 + mantissa) * 2.0 ** (exponent - bias)


def nearest(values: np.ndarray, name: str) -> np.ndarray:
    """Each value's nearest number, by a search; of two the one whose last bit is 0."""
    _, *layout = LAYOUTS[name]
    codes = [code for code in range(2 ** (sum(layout))) if math.isfinite(number(code, *layout))]
    sizes = np.array([number(code, *layout) for code in codes])
    order = [code for code in codes if code % 2 == 0] + [code for code in codes if code % 2]
    distances = np.abs(np.abs(values)[:, None] - sizes[order])
    return np.copysign(sizes[np.array(order)[distances.argmin(1)]], values)
