"""One slice of the loss as a result: the three models, whose losses are known, and the grid.

Shapes: B sequences, Q points, X and Y coordinates of the grid.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from base.environment import environment
from base.errors import UserError
from base.ranks import Ranks
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.forward import names_in_files
from ckpt_tools.hf.model import identify, load_hf_model
from curvature.settings import SliceSettings
from curvature.slices.corners import Corner, Corners, open_corner
from curvature.slices.plane import (
    Plane,
    PlanePoint,
    SequenceLosses,
    check_finite,
    grid_coordinates,
    losses_at,
    losses_on_grid,
    through_three,
)
from curvature.subject import Batches

POINT_TOLERANCE = 1e-5  # relative difference of a point's loss on the plane and from its own files
UNITS = {
    "points.x, points.y, grid.x, grid.y, directions.lengths": (
        "Euclidean distance of the parameters"
    ),
    "points.loss, points.increase, points.losses, grid.loss": "nats per token",
    "points.relative_difference": "of loss (on the plane) to loss_from_files (the point's own)",
}


class PlaneText(NamedTuple):
    """The sequences that every loss is over, int64 [B, S + 1], and what a result says of them."""

    tokens_BS1: Tensor
    settings: SliceSettings
    described: dict[str, Any]


def open_sequences(hf_dir: Path, settings: SliceSettings, data_prefix: Path) -> PlaneText:
    """Return the sequences for a model; UserError if the text does not fit it."""
    batches = Batches(
        data_prefix,
        read_config(hf_dir),
        sequence_length=settings.sequence_length,
        seed=settings.seed,
        needed=settings.sequences,
    )
    described = {"sequence_length": batches.sequence_length, "data": batches.described}
    return PlaneText(batches.number(0, settings.sequences), settings, described)


def load_losses(corner: Corner, sequences: PlaneText, ranks: Ranks) -> SequenceLosses:
    """Return the losses of a model as transformers reads it, quantized weights put in its place.

    This is the reading that planes are checked by.

    Raises:
        UserError: the files are no model.
    """
    model = load_hf_model(corner.hf_dir, torch.float32, "sdpa")
    model.to(ranks.device)  # type: ignore[arg-type]
    losses = SequenceLosses(model, sequences.tokens_BS1, sequences.settings.batch_size)
    files = names_in_files(model)
    with torch.no_grad():
        for name, weight in losses.weights.items():
            tensor = corner.quantized.get(files[name])
            if tensor is not None:
                weight.copy_(tensor.read(0, tensor.shape[0]).view_as(weight))
    return losses


def losses_from_files(losses: SequenceLosses, corner: Corner) -> Tensor:
    """Return the losses of a model that was just loaded; UserError if one is not finite."""
    losses_B = losses()
    check_finite(str(corner.path), losses_B, "give weights that are finite")
    return losses_B


def measure(
    paths: Sequence[Path],
    names: Sequence[str],
    settings: SliceSettings,
    data_prefix: Path,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the content of result.json of the plane through three models, without writing it.

    Each is an HF directory or a result with dequantized weights. Their weights are in memory twice.

    Raises:
        UserError: models, text and settings do not fit, a loss is not finite, or a point of the
            plane does not have the loss of its files.
    """
    clock = time.perf_counter()
    # What does not fit is refused before a weight is read.
    corners = Corners([open_corner(path) for path in paths])
    base = corners.corners[0]
    sequences = open_sequences(base.hf_dir, settings, data_prefix)
    identities = [identify(corner.hf_dir) if ranks.rank == 0 else {} for corner in corners.corners]
    gram = corners.gram(ranks)
    plane = through_three(gram.differences_NN)

    # The base comes last: its model is the one that moves, and no other is in memory by then.
    direct = {}
    for name, corner in reversed(list(zip(names, corners.corners, strict=True))):
        losses = load_losses(corner, sequences, ranks)
        direct[name] = losses_from_files(losses, corner)
        if corner is not base:
            del losses
    direct = {name: direct[name] for name in names}

    measured = _measured(corners, plane, losses, direct, settings, ranks)
    points = [
        {"name": name, **identity, "path": str(corner.path), "spec": corner.spec}
        for name, corner, identity in zip(names, corners.corners, identities, strict=True)
    ]
    spec = settings.model_dump(mode="json") | {"plane": points, "name": f"slice-{names[-1]}"}
    spec |= sequences.described | {"precision": "fp32", "attention": "sdpa"}
    size = sum(weight.numel() for weight in losses.weights.values())
    return {
        "model": identities[0],
        "spec": spec,
        "measured": measured | {"parameters": size, "theta_norm": gram.theta_norm, "units": UNITS},
        "environment": environment() | {"seconds": time.perf_counter() - clock},
    }


def _measured(
    corners: Corners,
    plane: Plane,
    losses: SequenceLosses,
    direct: dict[str, Tensor],
    settings: SliceSettings,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the named points and the grid. `direct` are the points' losses from their files."""
    named = [PlanePoint(0.0, 0.0), *plane.ends]
    at_points = [plane.coefficients(point) for point in named]
    losses_QB = losses_at(corners, losses, at_points, ranks, "points")
    # Refused before the grid is paid for.
    points = [
        {"name": name, "x": point.x, "y": point.y}
        | described_losses(losses_B, losses_QB[0])
        | checked_losses(name, direct_B, losses_B)
        for (name, direct_B), point, losses_B in zip(direct.items(), named, losses_QB, strict=True)
    ]
    lengths = [math.hypot(*end) for end in plane.ends]
    return {
        "points": points,
        "directions": {"lengths": lengths, "cosine": plane.ends[1].x / lengths[1]},
        "grid": measured_grid(corners, plane, losses, named, max(lengths), settings, ranks),
    }


def measured_grid(
    corners: Corners,
    plane: Plane,
    losses: SequenceLosses,
    points: Sequence[PlanePoint],
    length: float,
    settings: SliceSettings,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return coordinates and losses of a grid that holds all points.

    It reaches `settings.extent` times `length` beyond them.
    """
    margin = settings.extent * length
    x_X, y_Y = (
        grid_coordinates([point[axis] for point in points], margin, settings.grid)
        for axis in range(2)
    )
    loss_YX = losses_on_grid(corners, plane, losses, x_X, y_Y, ranks).mean(dim=-1)
    return {"x": x_X, "y": y_Y, "loss": loss_YX.tolist()}


def described_losses(losses_B: Tensor, base_B: Tensor) -> dict[str, Any]:
    """Return the loss of a point, its increase over another's, and their standard errors."""
    increase_B = losses_B - base_B  # paired over sequences
    return {
        "loss": float(losses_B.mean()),
        "standard_error": _standard_error(losses_B),
        "increase": float(increase_B.mean()),
        "increase_standard_error": _standard_error(increase_B),
        "losses": losses_B.tolist(),
    }


def checked_losses(name: str, direct_B: Tensor, losses_B: Tensor) -> dict[str, Any]:
    """Return a point's loss from its own files, beside that of the same weights put together.

    Raises:
        UserError: the two differ by more than rounding.
    """
    loss, from_files = float(losses_B.mean()), float(direct_B.mean())
    difference = abs(loss - from_files) / from_files
    if not difference <= POINT_TOLERANCE:
        raise UserError(
            f"the {name} point has loss {loss:.7g} put together and {from_files:.7g} from its own"
            f" files, {difference:.1e} apart (at most {POINT_TOLERANCE:g}): not the same weights;"
            " export or quantize again"
        )
    return {"loss_from_files": from_files, "relative_difference": difference}


def _standard_error(values_B: Tensor) -> float:
    return float(values_B.std() / len(values_B) ** 0.5)
