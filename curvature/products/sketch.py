"""A count sketch: a short picture of a vector over all parameters, which keeps its length.

The entries of a tensor, each times a sign of its own, are dealt out to 65,536 buckets and added up
there (Charikar, Chen and Farach-Colton 2002). The map is linear, and the squared length of the
picture has the vector's as its mean over the signs (Alon, Matias and Szegedy 1996); for a vector
spread over the buckets of one tensor it scatters by sqrt(2 / 65536) = 0.6%, less where there are
many tensors, and a tensor of as many entries or fewer is kept as it is. So two vectors are compared
that are never in memory.

Shapes: p parameters of this rank, s entries of a picture on this rank.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.products.parameters import Parameters, Probe, dot, local

BUCKETS = 1 << 16
ENTRIES_AT_ONCE = 1 << 22  # turned into float64; a multiple of BUCKETS
SIGNS_PROBE = -2  # no pair and no start uses it


class CountSketch:
    """Pictures of vectors x: v_t . x_t with a probe v, and buckets of x_t, of every tensor t."""

    def __init__(self, parameters: Parameters, along: Probe) -> None:
        self.along = along
        self._parameters, self._signs = parameters, Probe(along.seed, SIGNS_PROBE)
        # A tensor's part of a picture is v_t . x_t, then its buckets.
        self._sizes = [1 + _width(local(weight)) for weight in parameters.weights.values()]

    def part(self, name: str, x: Tensor) -> Tensor:
        """Return the picture of this rank's part of a vector in one tensor, float64 on the CPU."""
        x_n = x.detach().flatten()
        signs_n = self._parameters.signs(name, self._signs).flatten()
        width = _width(x_n)
        sums = torch.zeros(width, dtype=torch.float64, device=x.device)
        # Entry i falls into bucket i mod width: pieces but the last are multiples of the width.
        for entries, signs in zip(
            x_n.split(ENTRIES_AT_ONCE), signs_n.split(ENTRIES_AT_ONCE), strict=True
        ):
            signed = entries.double() * signs
            sums += F.pad(signed, (0, -len(signed) % width)).view(-1, width).sum(0)
        along = dot(self._parameters.signs(name, self.along), x)
        return torch.cat([along[None], sums]).cpu()

    def whole(self, part_of: Callable[[str], Tensor]) -> Tensor:
        """Return the picture made of the parts of all tensors, float64 [s]."""
        return torch.cat([part_of(name) for name in self._parameters.weights])

    def dots(self, picture_s: Tensor) -> dict[str, float]:
        """Return v_t . x_t of every tensor t over all ranks, by name."""
        return self._parameters.total([part[0] for part in picture_s.split(self._sizes)])

    def squares(self, picture_s: Tensor) -> dict[str, float]:
        """Return about |x_t|^2 of every tensor t over all ranks, by name."""
        return self._parameters.total(
            [part[1:].square().sum() for part in picture_s.split(self._sizes)]
        )

    def norm(self, picture_s: Tensor) -> float:
        """Return about |x| over all ranks."""
        return math.sqrt(math.fsum(self.squares(picture_s).values()))


def _width(x: Tensor) -> int:
    """Return the number of buckets of a tensor, 1 if this rank has nothing of it."""
    return max(1, min(x.numel(), BUCKETS))
