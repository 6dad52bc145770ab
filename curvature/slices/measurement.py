"""One slice of the loss as a result: the three models, whose losses are known, and the grid.

Shapes: B sequences, Q points, X and Y coordinates of the grid.
"""

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from base.environment import environment
from base.errors import UserError
from base.ranks import Ranks
from ckpt_tools.hf.configuration import read_config
from ckpt_tools.hf.forward import names_in_files
from ckpt_tools.hf.model import identify, load_hf_model
from curvature.settings import SliceSettings
from curvature.slices.plane import (
    Plane,
    PlanePoint,
    SequenceLosses,
    check_finite,
    dot,
    grid_coordinates,
    losses_at,
)
from curvature.step.quantized import read_step
from curvature.subject import Batches

POINT_TOLERANCE = 1e-5  # relative difference of a point's loss on the plane and from its own files
UNITS = {
    "points.x, points.y, grid.x, grid.y, directions.lengths": (
        "Euclidean distance of the parameters"
    ),
    "points.loss, points.increase, points.losses, grid.loss": "nats per token",
    "points.relative_difference": "of loss (on the plane) to loss_from_files (the point's own)",
}


def measure(
    hf_dir: Path,
    previous: Path,
    quantized: Path,
    settings: SliceSettings,
    data_prefix: Path,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the content of result.json of the plane through three models, without writing it.

    Raises:
        UserError: models, text and settings do not fit, a loss is not finite, or a point of the
            plane does not have the loss of its files.
    """
    identity = identify(hf_dir)
    clock = time.perf_counter()
    batches = Batches(
        data_prefix,
        read_config(hf_dir),
        sequence_length=settings.sequence_length,
        seed=settings.seed,
        needed=settings.sequences,
    )
    tokens_BS1 = batches.number(0, settings.sequences)
    # A result that does not fit the model is refused before it is loaded.
    step = read_step(hf_dir, quantized)

    def losses_of(directory: Path) -> tuple[SequenceLosses, Tensor]:
        model = load_hf_model(directory, torch.float32, "sdpa")
        model.to(ranks.device)  # type: ignore[arg-type]
        losses = SequenceLosses(model, tokens_BS1, settings.batch_size)
        losses_B = losses()
        check_finite(str(directory), losses_B, "give weights that are finite")
        return losses, losses_B

    # the first direction, to the checkpoint before
    base, base_B = losses_of(hf_dir)
    before, before_B = losses_of(previous)
    shapes = [
        {name: weight.shape for name, weight in model.weights.items()} for model in (base, before)
    ]
    if shapes[0] != shapes[1]:
        raise UserError(
            f"{previous} has other parameters than {hf_dir}; give a checkpoint of the same model"
        )
    with torch.no_grad():
        first = {name: before.weights[name] - weight for name, weight in base.weights.items()}
    del before  # a copy of the weights less

    # the second, to the quantized weights
    files = names_in_files(base.model)
    second = {
        name: delta.view_as(weight).to(weight.device)
        for name, weight in base.weights.items()
        if (delta := step.delta(files[name])) is not None
    }

    theta_norm = math.sqrt(dot(base.weights, base.weights))
    plane = Plane(base.weights, first, second)
    with torch.no_grad():  # the plane holds a copy of the base, from which it sets the weights
        for name in second:
            tensor = step.quantized[files[name]]
            base.weights[name].copy_(tensor.read(0, tensor.shape[0]).view_as(base.weights[name]))

    # The base holds the quantized weights now: its loss is that of the third point.
    measured = _measured(
        plane, base, {"base": base_B, "previous": before_B, "quantized": base()}, settings, ranks
    )

    spec = settings.model_dump(mode="json") | {
        "plane": "checkpoints",
        "previous": identify(previous),
        "quantized": {"path": str(quantized), "spec": step.spec},
        "name": f"slice-{quantized.resolve().name}",
        "sequence_length": batches.sequence_length,
        "data": batches.described,
        "precision": "fp32",
        "attention": "sdpa",
    }
    size = sum(weight.numel() for weight in base.weights.values())
    return {
        "model": identity,
        "spec": spec,
        "measured": measured | {"parameters": size, "theta_norm": theta_norm, "units": UNITS},
        "environment": environment() | {"seconds": time.perf_counter() - clock},
    }


def _measured(
    plane: Plane,
    losses: SequenceLosses,
    direct: dict[str, Tensor],
    settings: SliceSettings,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the named points and the grid. `direct` are the points' losses from their files."""
    named = [PlanePoint(0.0, 0.0), *plane.ends]
    losses_QB = losses_at(plane, losses, named, ranks, "points")
    # Refused before the grid is paid for.
    points = [
        _described(name, point, direct_B, losses_B, losses_QB[0])
        for (name, direct_B), point, losses_B in zip(direct.items(), named, losses_QB, strict=True)
    ]
    lengths = [math.hypot(*end) for end in plane.ends]
    margin = settings.extent * max(lengths)
    x_X, y_Y = (
        grid_coordinates([point[axis] for point in named], margin, settings.grid)
        for axis in range(2)
    )
    grid_QB = losses_at(plane, losses, [PlanePoint(x, y) for y in y_Y for x in x_X], ranks, "grid")
    # The points were listed row by row of y.
    loss_YX = grid_QB.view(settings.grid, settings.grid, -1).mean(dim=-1)
    return {
        "points": points,
        "directions": {"lengths": lengths, "cosine": plane.cosine},
        "grid": {"x": x_X, "y": y_Y, "loss": loss_YX.tolist()},
    }


def _described(
    name: str, point: PlanePoint, direct_B: Tensor, losses_B: Tensor, base_B: Tensor
) -> dict[str, Any]:
    """Return a point with its losses on the plane and from its own files.

    Raises:
        UserError: the two differ by more than rounding.
    """
    loss, from_files = float(losses_B.mean()), float(direct_B.mean())
    difference = abs(loss - from_files) / from_files
    if not difference <= POINT_TOLERANCE:
        raise UserError(
            f"the {name} point has loss {loss:.7g} on the plane and {from_files:.7g} from its own"
            f" files, {difference:.1e} apart (at most {POINT_TOLERANCE:g}): not the same weights;"
            " export or quantize again"
        )
    increase_B = losses_B - base_B  # paired over sequences
    return {
        "name": name,
        "x": point.x,
        "y": point.y,
        "loss": loss,
        "standard_error": _standard_error(losses_B),
        "increase": float(increase_B.mean()),
        "increase_standard_error": _standard_error(increase_B),
        "losses": losses_B.tolist(),
        "loss_from_files": from_files,
        "relative_difference": difference,
    }


def _standard_error(values_B: Tensor) -> float:
    return float(values_B.std() / len(values_B) ** 0.5)
