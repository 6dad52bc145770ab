"""The one table of quantization methods: widths, settings and sources.

A setting that a method's row does not name does not exist for it: `QuantSpec` refuses it.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

MethodName = Literal[
    "rtn",
    "gptq",
    "atom",
    "quik",
    "qtip",
    "gptqmodel",
    "gptaq",
    "awq",
    "autoround",
    "int8",
    "nf4",
    "none",
]

# What a spec can say besides how weights are rounded.
CACHE = ("kv",)
CASTS = ("activations", "static_activations", *CACHE)
TRANSFORMS = ("shift", "smooth", "rotation", "rotation_block")


@dataclass(frozen=True)
class Method:
    """One method of rounding weights.

    Attributes:
        title: what a figure calls it.
        library: whose code rounds the weights.
        bits: the widths it takes.
        defaults: its settings and what a name that leaves them out means; None: the name has to say
            it.
        source: paper, and which implementation.
        needs_calibration: whether its result depends on the calibration text.
        extras: what a spec of it can say besides.
    """

    title: str
    library: Literal["quantdyn", "gptqmodel", "llmcompressor", "auto-round", "bitsandbytes"]
    bits: tuple[int, ...]
    defaults: dict[str, Any] = field(hash=False)
    source: str
    needs_calibration: bool = True
    extras: tuple[str, ...] = ()


_WIDTHS = tuple(range(2, 9))
_GROUPS: dict[str, Any] = {"group_size": None, "symmetric": True}
_ORDER: dict[str, Any] = {"order": "natural", "static_groups": False, "damping": 0.05}

METHODS: dict[MethodName, Method] = {
    "rtn": Method(
        title="RTN",
        library="quantdyn",
        bits=_WIDTHS,
        defaults=_GROUPS | {"scales": "fp32"},
        source="rounding to nearest on min-max grids (base/rounding/grid.py)",
        needs_calibration=False,
        extras=CASTS + TRANSFORMS,
    ),
    "gptq": Method(
        title="GPTQ",
        library="quantdyn",
        bits=_WIDTHS,
        defaults=_GROUPS | _ORDER | {"scales": "fp32"},
        source="Frantar et al. 2022, arXiv:2210.17323, algorithm 1 (base/rounding/gptq.py)",
        extras=CASTS + TRANSFORMS,
    ),
    "atom": Method(
        title="Atom",
        library="quantdyn",
        bits=_WIDTHS,
        defaults=_GROUPS | {"damping": 0.05, "kept": None},
        source=(
            "Zhao et al. 2023, arXiv:2310.19102: GPTQ with the inputs of the largest H_ii last and"
            " in 8 bits (quant_eval/rounding/mixed.py)"
        ),
        extras=CASTS,
    ),
    "quik": Method(
        title="QUIK",
        library="quantdyn",
        bits=_WIDTHS,
        defaults=_GROUPS | {"damping": 0.05, "kept": None},
        source=(
            "Ashkboos et al. 2023, arXiv:2310.09259: GPTQ with the inputs of the largest H_ii last"
            " and not rounded (quant_eval/rounding/mixed.py)"
        ),
        extras=CASTS,
    ),
    "qtip": Method(
        title="QTIP",
        library="quantdyn",
        bits=(2, 3, 4),
        defaults={"damping": 0.05, "states": 12},
        source=(
            "Tseng et al. 2024, arXiv:2406.11235: trellis codes of 2^states states after random"
            " Hadamard transforms (quant_eval/rounding/trellis.py)"
        ),
        extras=CACHE,
    ),
    "gptqmodel": Method(
        title="GPTQ (gptqmodel)",
        library="gptqmodel",
        bits=(2, 3, 4, 8),
        defaults=_GROUPS | _ORDER,
        source=(
            "arXiv:2210.17323 as ModelCloud's gptqmodel 7.6 implements it; -paper is what"
            " arXiv:2510.06213 ran"
        ),
    ),
    "gptaq": Method(
        title="GPTAQ",
        library="gptqmodel",
        bits=(2, 3, 4, 8),
        defaults=_GROUPS | {"damping": 0.05, "alpha": 0.25},
        source="Li et al. 2025, arXiv:2504.02692, by gptqmodel 7.6",
    ),
    "awq": Method(
        title="AWQ",
        library="llmcompressor",
        bits=(3, 4, 8),
        defaults={"group_size": None, "symmetric": False},
        source=(
            "Lin et al. 2023, arXiv:2306.00978, by llmcompressor 0.14 with this project's mappings"
        ),
    ),
    "autoround": Method(
        title="AutoRound",
        library="auto-round",
        bits=(2, 3, 4, 8),
        defaults=_GROUPS | {"iterations": 200},
        source="Cheng et al. 2023, arXiv:2309.05516, by auto-round 0.15",
    ),
    "int8": Method(
        title="LLM.int8()",
        library="bitsandbytes",
        bits=(8,),
        defaults={"threshold": None},
        source=(
            "Dettmers et al. 2022, arXiv:2208.07339, by bitsandbytes 0.50; activations are"
            " quantized too"
        ),
        needs_calibration=False,
    ),
    "nf4": Method(
        title="NF4",
        library="bitsandbytes",
        bits=(4,),
        defaults={"group_size": None},
        source=(
            "Dettmers et al. 2023, arXiv:2305.14314, by bitsandbytes 0.50, without double"
            " quantization"
        ),
        needs_calibration=False,
    ),
    "none": Method(
        title="Weights as they are",
        library="quantdyn",
        bits=(16,),
        defaults={},
        source="for specs that cast activations or the KV cache alone, such as a8 and kv4",
        needs_calibration=False,
        extras=CASTS + TRANSFORMS,
    ),
}
