"""All parameters of a model as one flat vector, and the blocks it falls into.

Shapes: P parameters of the whole model.
"""

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from curvature.probes import rademacher

LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")


def block_of(name: str) -> str:
    """The block a parameter is counted in: 'embedding', 'layer<i>', or 'head' (final norm and unembedding)."""
    if name.startswith("model.embed_tokens."):
        return "embedding"
    if layer := LAYER_NAME.match(name):
        return f"layer{layer[1]}"
    return "head"


class Parameters:
    """The parameters of a model in `named_parameters()` order, which is the order inside every vector v_P.

    Attributes:
        weights: the model's own tensors by name; nothing is copied.
        size: P.
    """

    def __init__(self, model: nn.Module) -> None:
        self.weights: dict[str, Tensor] = dict(model.named_parameters())
        self._sizes = [weight.numel() for weight in self.weights.values()]
        self.size = sum(self._sizes)
        first = next(iter(self.weights.values()))
        self.dtype, self.device = first.dtype, first.device

    def split(self, v_P: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector in the shapes of the parameters, by name."""
        pieces = v_P.split(self._sizes)
        return {name: piece.view_as(w) for piece, (name, w) in zip(pieces, self.weights.items(), strict=True)}

    @staticmethod
    def join(tensors: Iterable[Tensor]) -> Tensor:
        """The flat vector of tensors given in the order of the parameters."""
        return torch.cat([tensor.flatten() for tensor in tensors])

    def probe(self, seed: int, index: int) -> Tensor:
        """Probe `index` of a seed: a Rademacher vector v_P, in the parameters' precision."""
        signs = [
            rademacher(name, 0, size, seed=seed, probe=index, device=self.device).to(self.dtype)
            for name, size in zip(self.weights, self._sizes, strict=True)
        ]
        return torch.cat(signs)

    def block_sizes(self) -> dict[str, int]:
        """Number of parameters of each block, in the order of the model."""
        sizes: dict[str, int] = {}
        for name, size in zip(self.weights, self._sizes, strict=True):
            sizes[block_of(name)] = sizes.get(block_of(name), 0) + size
        return sizes

    def block_dots(self, a_P: Tensor, b_P: Tensor) -> dict[str, float]:
        """a_b . b_b of every block b; their sum is a . b."""
        dots: dict[str, float] = {}
        pieces = zip(self.weights, a_P.split(self._sizes), b_P.split(self._sizes), strict=True)
        for name, a, b in pieces:
            dots[block_of(name)] = dots.get(block_of(name), 0.0) + float(a @ b)
        return dots
