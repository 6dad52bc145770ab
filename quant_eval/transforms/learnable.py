"""The transforms whose values are learned: which factors each has, and how they begin.

`learned` changes their values. Every one is T = D H M, with the random Hadamard transform H of
`rhad` (`hadamard`), and begins as H alone:

- SpinQuant (arXiv:2405.16406) learns a rotation by the Cayley transform. Here M is block-diagonal,
  with one rotation per 128 features at most. The paper learns whole matrices [I, I], and those of
  the residual stream and of the heads alone; a step of a whole Cayley transform takes I^3.
- OSTQuant (arXiv:2501.13987) learns scales D besides, of every feature.
- FlatQuant (arXiv:2410.09426) learns scales and a Kronecker product M of two invertible matrices.
  The paper learns clipping thresholds too, which are left out here.

Blocks, since they lose least: on a layer of 256 inputs with planted outliers the error of W4A4 on
tokens that nothing was learned on falls from 0.020 (H) to 0.010 with one block of 256, 0.011 with
two of 128, 0.013 with eight of 32, and 0.016 with a Kronecker product of two rotations. With 1,024
inputs blocks of 128 reach what one of 1,024 does (0.018 of 0.027).

Shapes: I features, G blocks of K features, A and B the factors of I = A B.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from quant_eval.transforms.hadamard import hadamard_steps
from quant_eval.transforms.rotations import RotationName
from quant_eval.transforms.steps import Blocks, Diagonal, Kronecker, Step, Transform, compose

LARGEST_BLOCK = 128


class Scales(nn.Module):
    """A positive factor of each feature, by its logarithm."""

    rate = 0.03  # of learning

    def __init__(self, width: int) -> None:
        super().__init__()
        self.logarithms_I = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def step(self) -> Step:
        """Return them with their gradient."""
        return Diagonal(self.logarithms_I.exp())


class Rotations(nn.Module):
    """An orthogonal matrix of each block, by the Cayley transform in float64."""

    rate = 0.01
    blocks_GKK: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        size = max(size for size in range(1, LARGEST_BLOCK + 1) if width % size == 0)
        identity_KK = torch.eye(size, dtype=torch.float64)
        self.blocks_GKK = nn.Parameter(identity_KK.repeat(width // size, 1, 1))
        orthogonal(self, "blocks_GKK", orthogonal_map="cayley")

    def step(self) -> Step:
        """Return them with their gradient."""
        return Blocks(self.blocks_GKK)


class Factors(nn.Module):
    """Two matrices whose Kronecker product is invertible, of sizes as equal as possible."""

    rate = 0.01

    def __init__(self, width: int) -> None:
        super().__init__()
        left = min(size for size in range(1, width + 1) if size**2 >= width and width % size == 0)
        right = width // left
        self.left_AA = nn.Parameter(torch.zeros(left, left, dtype=torch.float64))
        self.right_BB = nn.Parameter(torch.zeros(right, right, dtype=torch.float64))

    def step(self) -> Step:
        """Return the product with its gradient.

        The parameters are differences to the identity.
        """
        return Kronecker(_plus_identity(self.left_AA), _plus_identity(self.right_BB))


Part = Scales | Rotations | Factors
PARTS: dict[RotationName, tuple[type[Scales] | None, type[Rotations] | type[Factors]]] = {
    "spinquant-blockwise": (None, Rotations),
    "ostquant-blockwise": (Scales, Rotations),
    "flatquant-blockwise": (Scales, Factors),
}


class Learnable(nn.Module):
    """T = D H M of one site.

    Args of the constructor:
        rotation: which of PARTS.
        width: of the site; it has a Hadamard matrix (`placement.places_of`).
        seed: of the random signs of H.
    """

    def __init__(self, rotation: RotationName, width: int, seed: Sequence[int]) -> None:
        super().__init__()
        scales, mixing = PARTS[rotation]
        self._start = nn.ModuleList(hadamard_steps(width, seed=seed))
        self.scales = scales(width) if scales else None
        self.mixing = mixing(width)

    def transform(self) -> Transform:
        """Return T at the present values, with their gradient where gradients are kept."""
        before = [self.scales.step()] if self.scales else []
        start = [step for step in self._start if isinstance(step, Step)]
        return compose(*before, *start, self.mixing.step())

    def parts(self) -> list[Part]:
        """Return what is learned."""
        return [self.scales, self.mixing] if self.scales else [self.mixing]


def _plus_identity(matrix_KK: Tensor) -> Tensor:
    return matrix_KK + torch.eye(len(matrix_KK), dtype=matrix_KK.dtype, device=matrix_KK.device)
