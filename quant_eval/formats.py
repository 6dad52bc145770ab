"""The one table of number formats besides plain integers, of weights and of activations."""

from dataclasses import dataclass
from typing import Literal

Format = Literal["int", "fp8", "fp8e5m2", "mxfp8", "mxfp4", "nvfp4", "ternary", "binary"]


@dataclass(frozen=True)
class NumberFormat:
    """One kind of numbers that weights, and most that activations, can be rounded to.

    Attributes:
        bits: of a number; of a ternary one its 1.58 rounded up.
        grouping: inputs that share a scale; 0: a whole row does; None: the name has to say it.
        is_cast: whether activations can have it too.
    """

    title: str
    bits: int
    grouping: int | None
    is_cast: bool
    source: str


FORMATS: dict[Format, NumberFormat] = {
    "fp8": NumberFormat("FP8", 8, 0, True, "E4M3: Micikevicius et al. 2022, arXiv:2209.05433"),
    "fp8e5m2": NumberFormat(
        "FP8 E5M2", 8, 0, True, "E5M2: Micikevicius et al. 2022, arXiv:2209.05433"
    ),
    "mxfp8": NumberFormat(
        "MXFP8",
        8,
        32,
        True,
        "E4M3, scales E8M0 of 32 numbers: Rouhani et al. 2023, arXiv:2310.10537",
    ),
    "mxfp4": NumberFormat(
        "MXFP4",
        4,
        32,
        True,
        "E2M1, scales E8M0 of 32 numbers: Rouhani et al. 2023, arXiv:2310.10537",
    ),
    "nvfp4": NumberFormat(
        "NVFP4",
        4,
        16,
        True,
        "E2M1, scales E4M3 of 16 numbers and one of the tensor: NVIDIA 2025, arXiv:2509.25149",
    ),
    "ternary": NumberFormat(
        "Ternary",
        2,
        None,
        False,
        "-1, 0, 1 times the mean |w|: Ma et al. 2024, arXiv:2402.17764",
    ),
    "binary": NumberFormat(
        "Binary",
        1,
        None,
        False,
        "-1, 1 times the mean |w|: Rastegari et al. 2016, arXiv:1603.05279",
    ),
}
CACHE_SOURCE = "integers per token and head as in arXiv:2404.00456; kvfp8: E4M3, one scale a tensor"
