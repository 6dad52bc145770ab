"""All parameters of a model as one flat vector, of which each rank may hold a part, and its copies.

Shapes: P parameters of the whole model, p those of this rank (all of them unless the model is
    sharded), K vectors.
"""

import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from curvature.dual.blocks import TANGENT
from curvature.products.probes import rademacher
from train.model.families import FAMILIES

LAYER_NAME = re.compile(r".*\.layers\.(\d+)\.")
EMBEDDINGS = {row.embedding_weight for row in FAMILIES.values()}
ENTRIES_PER_COPY = 1 << 24  # between host and GPU; 64 MB in fp32
# Entries turned into float64 at once: few for a CPU's cache, many as a GPU waits for every launch.
ENTRIES_PER_SUM = {"cpu": 1 << 20, "cuda": 1 << 24}


def block_of(name: str) -> str:
    """Return the block: embedding, layer<i>, or head (final norm and unembedding)."""
    if name in EMBEDDINGS:
        return "embedding"
    if layer := LAYER_NAME.match(name):
        return f"layer{layer[1]}"
    return "head"


def is_norm(name: str) -> bool:
    """Return whether a parameter is a norm's, with far larger Hessian entries than a matrix's."""
    # The last part but one is the module that holds the parameter.
    return "norm" in name.split(".")[-2]


@dataclass(frozen=True)
class Probe:
    """A Rademacher vector over all parameters, or over the tensors `only` and 0 elsewhere."""

    seed: int
    index: int
    only: Collection[str] | None = None


class Parameters:
    """The parameters of a model in `named_parameters()` order, which is that of every vector v_p.

    A sharded parameter is split by rows (FSDP2's Shard(0)); a rank's part of a vector joins its
    rows of every one.

    Attributes:
        weights: the model's own tensors by name.
        shapes: their whole shapes by name.
        size: P.
        device: of vectors.
    """

    def __init__(
        self,
        model: nn.Module,
        reduce: Callable[[Tensor], Tensor] = lambda summed: summed,
        device: torch.device | None = None,
    ) -> None:
        """`reduce` sums over the ranks with the other parts, `device` is that of vectors."""
        named = model.named_parameters()
        # Tangents are registered beside the weights, but belong to no vector v_p.
        self.weights: dict[str, nn.Parameter] = {
            name: w for name, w in named if not name.endswith(TANGENT)
        }
        self.shapes = {name: weight.shape for name, weight in self.weights.items()}
        self.size = sum(shape.numel() for shape in self.shapes.values())
        self._reduce = reduce
        self._starts = {name: _first_entry(weight) for name, weight in self.weights.items()}
        self._sizes = [local(weight).numel() for weight in self.weights.values()]
        first = local(next(iter(self.weights.values())))
        self.dtype, self.device = first.dtype, device or first.device

    def split(self, v_p: Tensor) -> dict[str, Tensor]:
        """Return views of a flat vector in the shapes of this rank's parameters, by name."""
        pieces = zip(v_p.split(self._sizes), self.weights.items(), strict=True)
        return {name: piece.view_as(local(weight)) for piece, (name, weight) in pieces}

    def zeros(self) -> Tensor:
        """Return the vector 0."""
        return torch.zeros(sum(self._sizes), dtype=self.dtype, device=self.device)

    def point(self) -> Tensor:
        """Return a copy of the parameters themselves, theta_p."""
        theta_p = self.zeros()
        for name, part in self.split(theta_p).items():
            copy(part, local(self.weights[name]))
        return theta_p

    @torch.no_grad()
    def move(
        self, theta_p: Tensor, direction: Callable[[str], Tensor] | None = None, step: float = 0.0
    ) -> None:
        """Set the parameters to theta, or to theta + step v where v is given tensor by tensor."""
        for name, values in self.split(theta_p).items():
            weight = copy(local(self.weights[name]), values)
            if direction:
                weight.add_(direction(name).to(weight.device), alpha=step)

    def first_row(self, name: str) -> int:
        """Return the row of a whole tensor that this rank's part begins at."""
        return self._starts[name] // max(1, self.shapes[name][1:].numel())

    def take(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return this rank's part of the vector of whole tensors by name, 0 for the others."""
        v_p = self.zeros()
        parts = self.split(v_p)
        for name, tensor in tensors.items():
            # A part is rows, so it is contiguous in the flattened whole.
            start, count = self._starts[name], parts[name].numel()
            parts[name].copy_(tensor.flatten()[start : start + count].view_as(parts[name]))
        return v_p

    def signs(self, name: str, probe: Probe) -> Tensor:
        """Return this rank's part of a probe in one tensor, on the tensor's device."""
        weight = local(self.weights[name])
        if probe.only is not None and name not in probe.only:
            return torch.zeros_like(weight)
        start = self._starts[name]
        drawn = rademacher(
            name,
            start,
            start + weight.numel(),
            seed=probe.seed,
            probe=probe.index,
            device=weight.device,
            dtype=weight.dtype,
        )
        return drawn.view_as(weight)

    def probe(self, probe: Probe) -> Tensor:
        """Return a probe as a vector v_p."""
        v_p = self.zeros()
        for name, part in self.split(v_p).items():
            copy(part, self.signs(name, probe))
        return v_p

    def inner(self, vectors_Kp: Sequence[Tensor] | Tensor, b_p: Tensor) -> Tensor:
        """Return a_k . b of K vectors a_k over all ranks, float64 [K] on the CPU."""
        sums_K = torch.zeros(len(vectors_Kp), dtype=torch.float64, device=b_p.device)
        entries = ENTRIES_PER_SUM[b_p.device.type]
        for start in range(0, len(b_p), entries):
            part = slice(start, start + entries)
            wide = b_p[part].double()  # all vectors meet a part while it is in the cache
            for k, a_p in enumerate(vectors_Kp):
                sums_K[k] += a_p[part].double() @ wide
        return self._reduce(sums_K.cpu())

    def norm(self, v_p: Tensor) -> float:
        """Return |v| over all ranks."""
        return math.sqrt(float(self.inner(v_p[None], v_p)))

    def total(self, sums: list[Tensor]) -> dict[str, float]:
        """Return one number of every tensor, in their order, summed over the ranks, by name."""
        totals = self._reduce(torch.stack(sums).cpu()).tolist()
        return dict(zip(self.weights, totals, strict=True))

    def matrices(self) -> list[str]:
        """Return the names of the decoder blocks' matrices: what quantization rounds."""
        return [
            name
            for name, shape in self.shapes.items()
            if len(shape) == 2 and LAYER_NAME.match(name) and not is_norm(name)
        ]

    def mean_squares(self) -> dict[str, float]:
        """Return the mean square of the entries of each parameter, by name."""
        parts = map(local, self.weights.values())
        sums = self.total([dot(part, part) for part in parts])
        return {name: value / self.shapes[name].numel() for name, value in sums.items()}

    def block_sizes(self) -> dict[str, int]:
        """Return the number of parameters of each block, in the order of the model."""
        sizes: dict[str, int] = {}
        for name, shape in self.shapes.items():
            sizes[block_of(name)] = sizes.get(block_of(name), 0) + shape.numel()
        return sizes


def local(weight: Tensor) -> Tensor:
    """Return this rank's part of a parameter."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of a b over two tensors on this rank, a float64 scalar.

    Example:
        >>> float(dot(torch.ones(3), torch.tensor([1.0, 2.0, 3.0])))
        6.0
    """
    a_n, b_n = a.detach().flatten(), b.detach().flatten()
    entries = ENTRIES_PER_SUM[a.device.type]
    parts = zip(a_n.split(entries), b_n.split(entries), strict=True)
    sums = [x.double() @ y.double() for x, y in parts]
    return torch.stack(sums).sum()


def _first_entry(weight: Tensor) -> int:
    """Return the place in the flattened whole of this rank's first entry of a parameter."""
    if not isinstance(weight, DTensor):
        return 0
    rows, mesh = weight.shape[0], weight.device_mesh
    # FSDP2 deals rows out as torch.chunk does.
    first = min(rows, mesh.get_local_rank() * -(-rows // mesh.size()))
    return first * (weight.numel() // rows)


def copy(target: Tensor, source: Tensor) -> Tensor:
    """Copy a contiguous tensor into another of the same shape, and return that one."""
    for into, part in _pieces(target, source.detach()):
        into.copy_(part)
    return target


def add(target: Tensor, source: Tensor) -> Tensor:
    """Add a contiguous tensor to another of the same shape where that is, and return that one."""
    for into, part in _pieces(target, source.detach()):
        into.add_(part)
    return target


def _pieces(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pieces of the target, and of the source on the target's device.

    Between host and GPU they pass through one pinned buffer: the GPU reads and writes pinned memory
    at the full speed of its bus, and the copy on the host uses all of its threads. Whole vectors
    are not pinned: a basis of many would lock most of a node's memory. The GPU changes the
    precision.
    """
    if {target.device.type, source.device.type} != {"cpu", "cuda"}:
        yield target, source
        return
    pinned = _buffer(source.dtype)
    slices = (flat.split(ENTRIES_PER_COPY) for flat in (target.view(-1), source.reshape(-1)))
    for into, part in zip(*slices, strict=True):
        # One buffer is enough: copies block, and a piece is used before the next is asked for.
        yield into, pinned[: len(part)].copy_(part).to(into.device)


@functools.cache
def _buffer(dtype: torch.dtype) -> Tensor:
    return torch.empty(ENTRIES_PER_COPY, dtype=dtype, pin_memory=True)
