"""Directions between two sets of weights in files, and a model that is moved along them.

Neither a direction nor a second model is ever in memory: a few rows at a time are read of both sets
of files for every point. theta + c d is computed in fp32 from the files and rounded once, to the
precision of the pass; a point is never made of another one, so no rounding adds up.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from base.errors import UserError
from ckpt_tools.formats.hf_weights import HFWeights
from ckpt_tools.formats.weights import FileTensor
from curvature.products.parameters import dot
from curvature.products.probes import rademacher
from curvature.step.quantized import QuantizationStep
from curvature.subject import WeightFiles

NOISE_PROBES = -3, -2  # of the signs that move weights by a digit; no other measurement has them
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


class Direction(NamedTuple):
    """d = sign (other - theta), by tensors in files; a tensor that `other` lacks does not move.

    Attributes:
        name: of the result.
        sign: -1 for the move from an earlier checkpoint to theta.
        start: the multiple of the first symmetric pair: a guess of one that raises the loss a
            little, which saves passes where it is right.
    """

    name: str
    base: Mapping[str, FileTensor]
    other: Mapping[str, FileTensor]
    sign: float
    start: float

    def rows(self, file: str, start: int, stop: int, device: torch.device) -> Tensor | None:
        """Return rows [start, stop) of a tensor of d in fp32; None where it does not move."""
        if file not in self.other:
            return None
        other, base = (
            tensors[file].read(start, stop).to(device).float()
            for tensors in (self.other, self.base)
        )
        return other.sub_(base).mul_(self.sign)


def move_from(previous: Path, hf_dir: Path) -> Direction:
    """Return theta_K - theta_K-1, from the checkpoint before to a model.

    UserError where it is of another shape.
    """
    base, before = HFWeights(hf_dir).tensors, HFWeights(previous).tensors
    shapes = [{name: tensor.shape for name, tensor in each.items()} for each in (base, before)]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{previous} has other parameters than {hf_dir}; give a checkpoint of the same model"
        )
    return Direction("move", base, before, sign=-1.0, start=1 / 32)


def step_to(step: QuantizationStep) -> Direction:
    """Return Q(theta) - theta, from a model to its quantized weights."""
    return Direction(f"step-{step.spec}", step.base, step.quantized, sign=1.0, start=1 / 2)


class MovedModel:
    """The causal language model of an HF directory, whose weights are set to points on lines.

    It needs no more memory than inference. Its parameters are in `dtype`, on `device`.
    """

    def __init__(
        self, hf_dir: Path, config: PretrainedConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._files, self._weights = WeightFiles(hf_dir, config), HFWeights(hf_dir)
        self._dtype, self._device = dtype, device
        self.model = self._files.empty(device, dtype).requires_grad_(False)

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(weight.numel() for weight in self.model.parameters())

    def move(self, direction: Direction | None = None, multiple: float = 0.0) -> None:
        """Set the weights to theta + c d, or to theta."""
        for name, weight in self.model.named_parameters():
            for rows, file, start in self._files.pieces(name, weight.detach()):
                stop = start + len(rows)
                point = self._weights.read(file, start, stop).to(self._device).float()
                moved = direction.rows(file, start, stop, self._device) if direction else None
                if moved is not None:
                    point.add_(moved, alpha=multiple)
                rows.copy_(point.view_as(rows))

    def disturb(self, seed: int) -> None:
        """Move weights to a neighbour in their precision: each way a quarter, half of them stay.

        0 stays. It is what rounding does to weights that are no numbers of the precision, and more:
        the root mean square is 0.71 units of the last digit, that of rounding 0.29.
        """
        for name, weight in self.model.named_parameters():
            for rows, file, start in self._files.pieces(name, weight.detach()):
                first = start * rows[0].numel()
                signs = [
                    rademacher(
                        file,
                        first,
                        first + rows.numel(),
                        seed=seed,
                        probe=probe,
                        device=self._device,
                        dtype=BITS[self._dtype],
                    )
                    for probe in NOISE_PROBES
                ]
                moved = signs[0].add_(signs[1]).div_(2, rounding_mode="trunc").view_as(rows)
                # Neighbours are those of the bits, but for 0, whose sign is a bit of its own.
                rows.view(BITS[self._dtype]).add_(moved.mul_(rows != 0))

    def norm(self, direction: Direction) -> float:
        """Return |d|; UserError where nothing moves."""
        squares = []
        for name, weight in self.model.named_parameters():
            for rows, file, start in self._files.pieces(name, weight.detach()):
                part = direction.rows(file, start, start + len(rows), self._device)
                squares += [] if part is None else [float(dot(part, part))]
        norm = math.sqrt(math.fsum(squares))
        if not 0 < norm < math.inf:
            raise UserError(
                f"the length of {direction.name} is {norm}; give weights that differ from the"
                " model's and are finite"
            )
        return norm
