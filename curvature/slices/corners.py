"""The weights of several models in files, put together row by row: none of them is in memory.

Read by `curvature.slices.measurement` and `curvature.slices.principal`; the geometry of their
planes is in `curvature.slices.plane`.

Shapes: N models, R rows read at once, E entries of these rows, T tensors.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from base.errors import UserError
from base.progress import Progress
from base.ranks import Ranks
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import FileTensor
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.directory import hf_directory_of
from ckpt_tools.hf.forward import check_shapes, empty_model, names_in_files
from curvature.step.quantized import read_step

BYTES_AT_ONCE = 1 << 28  # of the rows in memory, in float64


class Corner(NamedTuple):
    """A model that a plane is made of.

    Attributes:
        path: an HF directory, or the result of a quantization.
        hf_dir: where its configuration is; of a quantized model, that of the full one.
        tensors: all of its weights, by name in the files.
        quantized: those of them that a quantization changed.
        spec: the name of the quantization; None for weights as they are.
    """

    path: Path
    hf_dir: Path
    tensors: Mapping[str, FileTensor]
    quantized: Mapping[str, FileTensor]
    spec: str | None


def open_corner(path: Path) -> Corner:
    """Open a model by the headers of its files.

    Raises:
        UserError: it is no model, is damaged, or is a result without dequantized weights.
    """
    hf_dir = hf_directory_of(path)
    weights = HFWeights(hf_dir)
    if hf_dir == path:
        return Corner(path, hf_dir, weights.tensors, {}, None)
    step = read_step(hf_dir, path)
    return Corner(path, hf_dir, weights.tensors | step.quantized, step.quantized, step.spec)


class Gram(NamedTuple):
    """Inner products of the models' differences from the first, float64 [N, N], and its norm."""

    differences_NN: Tensor
    theta_norm: float


class Corners:
    """The corners of a plane, whose weights are read by rows.

    Raises:
        UserError: a model has other parameters than the first, or its files are not those of its
            config.json.
    """

    def __init__(self, corners: Sequence[Corner]) -> None:
        first = empty_model(read_config(corners[0].hf_dir))
        files = names_in_files(first)
        # A tied parameter is there once.
        self._shapes = {name: weight.shape for name, weight in first.named_parameters()}
        self._files = {name: files[name] for name in self._shapes}
        self.corners = corners

        for hf_dir in {corner.hf_dir: None for corner in corners}:
            model = empty_model(read_config(hf_dir))
            if {name: weight.shape for name, weight in model.named_parameters()} != self._shapes:
                raise UserError(
                    f"{hf_dir} has other parameters than {corners[0].hf_dir}; give checkpoints of"
                    " the same model"
                )
            check_shapes(model, HFWeights(hf_dir), hf_dir)

    def __len__(self) -> int:
        return len(self.corners)

    def gram(self, ranks: Ranks) -> Gram:
        """Return the inner products, of which each rank reads the tensors of its share.

        They do not depend on the number of ranks. In memory are N rows of a tensor at once.

        Raises:
            UserError: weights are not finite.
        """
        names, count = list(self._shapes), len(self)
        # The first model is its own difference from itself, 0: its place takes its own norm.
        products_TNN = torch.zeros(len(names), count, count, dtype=torch.float64)
        share = ranks.share(len(names))
        with Progress("distances", total=len(share)) as progress:
            for index in share:
                for start, stop in self._spans(names[index], count + 2):
                    rows_NE = self._rows_of_all(names[index], start, stop, ranks.device)
                    first_E = rows_NE[0].clone()
                    rows_NE[1:] -= first_E
                    products_TNN[index, 1:, 1:] += (rows_NE[1:] @ rows_NE[1:].T).cpu()
                    products_TNN[index, 0, 0] += (first_E @ first_E).cpu()
                progress.advance()
        # Summed over the ranks first, where other ranks' tensors are 0, and then in one order.
        differences_NN = ranks.sum(products_TNN).sum(dim=0)
        for corner, square in zip(self.corners, differences_NN.diagonal().tolist(), strict=True):
            if not math.isfinite(square):
                raise UserError(f"the weights of {corner.path} are not finite; give others")
        norm = math.sqrt(float(differences_NN[0, 0]))
        differences_NN[0, 0] = 0.0
        return Gram(differences_NN, norm)

    @torch.no_grad()
    def combine(self, coefficients_N: Sequence[float], into: Mapping[str, Tensor]) -> None:
        """Fill tensors, by name of a parameter, with the sum of coefficients times models.

        It is summed in float64 and rounded once: of one model alone it is that one to the bit. A
        model whose coefficient is 0 is not read.
        """
        used = [
            (corner, factor)
            for corner, factor in zip(self.corners, coefficients_N, strict=True)
            if factor
        ]
        for name, target in into.items():
            rows = target if target.dim() else target.view(1)  # a scalar is one row in the files
            for start, stop in self._spans(name, copies=3):
                into_rows = rows[start:stop]
                total_E = torch.zeros(into_rows.numel(), dtype=torch.float64, device=target.device)
                for corner, factor in used:
                    total_E.add_(self._rows(corner, name, start, stop, target.device), alpha=factor)
                into_rows.copy_(total_E.view_as(into_rows))

    def _rows_of_all(self, name: str, start: int, stop: int, device: torch.device) -> Tensor:
        """Return rows of a parameter of every model, float64 [N, E]."""
        entries = (stop - start) * math.prod(self._shapes[name][1:])
        rows_NE = torch.empty(len(self), entries, dtype=torch.float64, device=device)
        for row_E, corner in zip(rows_NE, self.corners, strict=True):
            row_E.copy_(self._rows(corner, name, start, stop, device))
        return rows_NE

    def _rows(
        self, corner: Corner, name: str, start: int, stop: int, device: torch.device
    ) -> Tensor:
        """Return rows of a parameter, float64 [E]."""
        rows = corner.tensors[self._files[name]].read(start, stop)
        # Wider on the device: less goes to a GPU.
        return rows.flatten().to(device).double()

    def _spans(self, name: str, copies: int) -> Iterator[tuple[int, int]]:
        """Yield the rows of a tensor of which so many copies in float64 are in memory at once."""
        shape = self._shapes[name]
        rows = shape[0] if shape else 1
        entries = math.prod(shape[1:])
        at_once = max(1, BYTES_AT_ONCE // (8 * copies * max(entries, 1)))
        for start in range(0, rows, at_once):
            yield start, min(start + at_once, rows)
