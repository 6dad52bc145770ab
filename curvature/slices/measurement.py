"""One slice of the loss: the points that must come out right, and the grid, as one result.

Shapes: B sequences, S positions of a sequence, Q points, X and Y coordinates of the grid.
"""

import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from base.environment import environment
from base.errors import UserError
from base.ranks import Ranks
from ckpt_tools.hf.forward import names_in_files, read_config
from ckpt_tools.hf.model import identify, load_hf_model, read_hf_config
from curvature.batches import Batches
from curvature.settings import SliceSettings
from curvature.slices.losses import SequenceLosses, mean_and_error
from curvature.slices.plane import (
    Plane,
    Point,
    check_finite,
    dot,
    grid_coordinates,
    losses_at,
)
from curvature.step.quantized import Step, read_step

# Keys of config.json that do not change what the model computes.
NOT_THE_FUNCTION = {
    *("transformers_version", "dtype", "torch_dtype", "use_cache", "_name_or_path"),
}
FINITE = "give weights that are finite"
POINT_TOLERANCE = 1e-5  # relative difference of a point's loss on the plane and from its own files
UNITS = {
    "points.x, points.y, grid.x, grid.y, directions.lengths": (
        "Euclidean distance of the parameters"
    ),
    "points.loss, points.increase, points.losses, grid.loss": "nats per token",
    "points.relative_difference": "of loss (on the plane) to loss_from_files (the point's own)",
}


class Ends(NamedTuple):
    """The two points of the plane besides theta_K."""

    previous: Path
    quantized: Path


class _Directions(NamedTuple):
    """The vectors that span the plane, and the losses of its ends from their own files, by name."""

    first: dict[str, Tensor]
    second: dict[str, Tensor]
    direct: dict[str, Tensor]
    settings: dict[str, Any]


def measure(
    hf_dir: Path, settings: SliceSettings, data_prefix: Path, ends: Ends, ranks: Ranks
) -> dict[str, Any]:
    """Return the content of result.json of the plane through `ends`; write nothing.

    Raises:
        UserError: models, text and settings do not fit, a loss is not finite, or a point of the
            plane does not have the loss of its files.
    """
    identity = identify(hf_dir)
    _check_same_configuration(hf_dir, ends.previous)
    clock = time.perf_counter()
    batches = Batches(
        data_prefix,
        read_config(hf_dir),
        sequence_length=settings.sequence_length,
        seed=settings.seed,
        needed=settings.sequences,
    )
    files = _Files(batches.number(0, settings.sequences), settings, ranks)
    base, stored = files.open(hf_dir)
    theta_norm = math.sqrt(dot(base.weights, base.weights))
    base_B = base()
    check_finite(str(hf_dir), base_B, FINITE)
    directions = _directions(base, stored, hf_dir, ends, files)
    measured = _plane(base, base_B, directions, settings, ranks)
    measured["parameters"] = sum(weight.numel() for weight in base.weights.values())
    measured["theta_norm"] = theta_norm
    spec = settings.model_dump(mode="json") | directions.settings
    spec |= {
        "name": f"slice-{ends.quantized.resolve().name}",
        "sequence_length": batches.sequence_length,
        "data": batches.described,
        "precision": "fp32",
        "attention": "sdpa",
    }
    return {
        "model": identity,
        "spec": spec,
        "measured": measured | {"units": UNITS},
        "environment": environment() | {"seconds": time.perf_counter() - clock},
    }


def _check_same_configuration(hf_dir: Path, previous: Path) -> None:
    ours, theirs = (read_hf_config(directory) for directory in (hf_dir, previous))
    for key in sorted((ours.keys() | theirs.keys()) - NOT_THE_FUNCTION):
        if ours.get(key) != theirs.get(key):
            raise UserError(
                f"{previous} has {key} {theirs.get(key)}, {hf_dir} has {ours.get(key)}; give a"
                " checkpoint of the same model"
            )


class _Files:
    """Models read from their files as a whole, and their losses on the text."""

    def __init__(self, tokens_BS1: Tensor, settings: SliceSettings, ranks: Ranks) -> None:
        self._tokens_BS1, self._batch_size, self._ranks = tokens_BS1, settings.batch_size, ranks

    def open(self, hf_dir: Path, step: Step | None = None) -> tuple[SequenceLosses, dict[str, str]]:
        """Return a model in fp32, quantized if a step is given, and its names in files."""
        model = load_hf_model(hf_dir, torch.float32, "sdpa")
        stored = {name: names_in_files(model)[name] for name, _ in model.named_parameters()}
        if step:
            if unknown := set(step.names) - set(stored.values()):
                raise UserError(
                    f"{step.spec} changed {sorted(unknown)[:3]}, no parameters of {hf_dir}; measure"
                    " it again"
                )
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if stored[name] in step.names:
                        held = step.quantized[stored[name]]
                        weight.copy_(held.read(0, held.shape[0]).view_as(weight))
        model.to(self._ranks.device)  # type: ignore[arg-type]
        return SequenceLosses(model, self._tokens_BS1, self._batch_size), stored


def _directions(
    base: SequenceLosses, stored: dict[str, str], hf_dir: Path, ends: Ends, files: _Files
) -> _Directions:
    previous, _ = files.open(ends.previous)
    direct = {"previous": previous()}
    check_finite(str(ends.previous), direct["previous"], FINITE)
    with torch.no_grad():
        first = {name: previous.weights[name] - weight for name, weight in base.weights.items()}
    del previous  # a copy of the weights less, before the next is read
    step = read_step(hf_dir, ends.quantized)
    direct["quantized"] = files.open(hf_dir, step)[0]()
    check_finite(str(ends.quantized), direct["quantized"], FINITE)
    second = {
        name: delta.view_as(base.weights[name]).to(base.weights[name].device)
        for name, file in stored.items()
        if (delta := step.delta(file)) is not None
    }
    settings = {
        "plane": "checkpoints",
        "previous": identify(ends.previous),
        "quantized": {"path": str(ends.quantized), "spec": step.spec},
    }
    return _Directions(first, second, direct, settings)


def _plane(
    base: SequenceLosses,
    base_B: Tensor,
    directions: _Directions,
    settings: SliceSettings,
    ranks: Ranks,
) -> dict[str, Any]:
    """Return the named points and the grid."""
    plane = Plane(base.weights, directions.first, directions.second)
    named = [Point(0.0, 0.0), *plane.ends]
    losses_QB = losses_at(plane, base, named, ranks, "points")
    # Refused before the grid is paid for.
    points = _points(named, losses_QB, {"base": base_B} | directions.direct)
    margin = settings.extent * max(math.hypot(*end) for end in plane.ends)
    x_X, y_Y = (
        grid_coordinates([point[axis] for point in named], margin, settings.grid)
        for axis in range(2)
    )
    grid_QB = losses_at(plane, base, [Point(x, y) for y in y_Y for x in x_X], ranks, "grid")
    loss_YX = grid_QB.view(settings.grid, settings.grid, -1).mean(dim=-1)
    return {
        "points": points,
        "directions": {"lengths": [math.hypot(*end) for end in plane.ends], "cosine": plane.cosine},
        "grid": {"x": x_X, "y": y_Y, "loss": loss_YX.tolist()},
    }


def _points(
    named: list[Point], losses_QB: Tensor, direct: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """Return the named points with their losses on the plane and from their own files.

    Raises:
        UserError: the two losses of a point differ by more than rounding.
    """
    rows = []
    for index, ((name, direct_B), point) in enumerate(zip(direct.items(), named, strict=True)):
        loss, error = mean_and_error(losses_QB[index])
        increase, increase_error = mean_and_error(losses_QB[index] - losses_QB[0])
        from_files = float(direct_B.mean())
        difference = abs(loss - from_files) / from_files
        if not difference <= POINT_TOLERANCE:
            raise UserError(
                f"the {name} point has loss {loss:.7g} on the plane and {from_files:.7g} from its"
                f" own files, {difference:.1e} apart (at most {POINT_TOLERANCE:g}): not the same"
                " weights; export or quantize again"
            )
        rows.append(
            {
                "name": name,
                "x": point.x,
                "y": point.y,
                "loss": loss,
                "standard_error": error,
                "increase": increase,
                "increase_standard_error": increase_error,
                "losses": losses_QB[index].tolist(),
                "loss_from_files": from_files,
                "relative_difference": difference,
            }
        )
    return rows
