"""The one table of transforms of the inputs of linears, with their sources."""

from dataclasses import dataclass
from typing import Literal

RotationName = Literal[
    "had",
    "rhad",
    "quarot",
    "quarot-fused",
    "duquant",
    "spinquant-blockwise",
    "ostquant-blockwise",
    "flatquant-blockwise",
]


@dataclass(frozen=True)
class Rotation:
    """One way to rotate the inputs of linears.

    Attributes:
        needs_calibration: whether it is fitted to the calibration text.
        is_learned: whether by steps of gradient descent.
        takes_block: whether its name can end in the width of its blocks.
    """

    title: str
    source: str
    needs_calibration: bool = False
    is_learned: bool = False
    takes_block: bool = False


_ONLINE = "in front of every linear"
ROTATIONS: dict[RotationName, Rotation] = {
    "had": Rotation("Hadamard", f"a Hadamard transform {_ONLINE}", takes_block=True),
    "rhad": Rotation(
        "random Hadamard",
        f"a Hadamard transform with random signs {_ONLINE}: the input side of QuIP#, Tseng et al."
        " 2024, arXiv:2402.04396",
        takes_block=True,
    ),
    "quarot": Rotation(
        "QuaRot",
        "Ashkboos et al. 2024, arXiv:2404.00456: R1 in front of q, k, v, gate and up, R2 on the"
        " values of each head, R3 on cached keys, R4 in front of down",
    ),
    "quarot-fused": Rotation(
        "QuaRot, fused",
        "the same with R1 in the weights of o and down and the norms' gains folded, as on Llama;"
        " not exact, so refused, where norms follow the linears or subtract the mean",
    ),
    "duquant": Rotation(
        "DuQuant",
        "Lin et al. 2024, arXiv:2406.01721: rotations of blocks from the largest outlier, with a"
        " permutation between them",
        needs_calibration=True,
        takes_block=True,
    ),
    "spinquant-blockwise": Rotation(
        "SpinQuant, by blocks",
        "rotations learned as in Liu et al. 2024, arXiv:2405.16406, on a block's own error",
        needs_calibration=True,
        is_learned=True,
    ),
    "ostquant-blockwise": Rotation(
        "OSTQuant, by blocks",
        "rotations and scales learned as in Hu et al. 2025, arXiv:2501.13987, on a block's own"
        " error",
        needs_calibration=True,
        is_learned=True,
    ),
    "flatquant-blockwise": Rotation(
        "FlatQuant, by blocks",
        "Kronecker factors learned as in Sun et al. 2024, arXiv:2410.09426, on a block's own error",
        needs_calibration=True,
        is_learned=True,
    ),
}
LEARNING_STEPS = 100  # of a learned rotation, where the name does not say -i
SMOOTH_SOURCE = "SmoothQuant, Xiao et al. 2022, arXiv:2211.10438"
SHIFT_SOURCE = "the mean shift of BASE-Q, He et al. 2025, arXiv:2506.15689"
