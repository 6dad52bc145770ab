"""One slice of the loss: settings, weights, the points that must come out right, the grid and SAM, as one result.

Shapes: B sequences, S positions of a sequence, Q points, X and Y coordinates of the grid.
"""

import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ckpt_tools.forward import names_in_files, read_config
from ckpt_tools.hf_model import identify, load_hf_model, read_hf_config
from ckpt_tools.ranks import Ranks
from curvature.batches import Batches
from curvature.slices.losses import SequenceLosses, mean_and_error
from curvature.slices.plane import (
    Plane,
    Point,
    check_finite,
    dot,
    grid_coordinates,
    losses_at,
    rounding_of,
    rounding_points,
    second_difference,
)
from curvature.slices.random_directions import filter_normalised
from curvature.slices.sam import sam_sharpness
from curvature.step.quantized import Step, read_step
from train.command import UserError
from train.frozen import Frozen
from train.tracking import environment

NOT_THE_FUNCTION = {"transformers_version", "dtype", "torch_dtype", "use_cache", "_name_or_path"}  # of config.json
FINITE = "give weights that are finite"
POINT_TOLERANCE = 1e-5  # relative difference of a point's loss on the plane and from its own files


class SliceSpec(Frozen):
    """Everything that decides the numbers, the models and the text aside."""

    name: str
    grid: int = Field(default=15, ge=3, description="points along either axis, theta_K among them")
    extent: float = Field(
        gt=0, description="how far the grid reaches beyond its points, in units of the longer direction"
    )
    sequences: int = Field(default=16, ge=2, description="of the text that every loss is over")
    sequence_length: int | None = Field(default=None, ge=1, description="tokens; None is the model's context")
    batch_size: int = Field(default=8, ge=1, description="sequences per forward pass")
    seed: int = Field(default=0, ge=0, lt=2**63, description="of the sequences and of random directions")
    radii: tuple[float, ...] = Field(min_length=1, description="of SAM, Euclidean")
    sam_steps: int = Field(default=1, ge=1, description="of the ascent within every radius")


class Ends(NamedTuple):
    """The two points of the paper's plane besides theta_K."""

    previous: Path
    quantized: Path


class _Directions(NamedTuple):
    """What spans the plane, and the losses of its ends from their own files, by name: none for a random plane."""

    first: dict[str, Tensor]
    second: dict[str, Tensor]
    direct: dict[str, Tensor]
    settings: dict[str, Any]


def _check_same_configuration(hf_dir: Path, previous: Path) -> None:
    ours, theirs = (read_hf_config(directory) for directory in (hf_dir, previous))
    for key in sorted((ours.keys() | theirs.keys()) - NOT_THE_FUNCTION):
        if ours.get(key) != theirs.get(key):
            raise UserError(
                f"{previous} has {key} {theirs.get(key)}, {hf_dir} has {ours.get(key)}; give a checkpoint of the "
                f"same model"
            )


class _Files:
    """Models read from their files as a whole, and their losses on the text."""

    def __init__(self, tokens_BS1: Tensor, spec: SliceSpec, ranks: Ranks) -> None:
        self._tokens_BS1, self._batch_size, self._ranks = tokens_BS1, spec.batch_size, ranks

    def open(self, hf_dir: Path, step: Step | None = None) -> tuple[SequenceLosses, dict[str, str]]:
        """A model in fp32, with a step's quantized tensors where one is given, and its parameters' names in files."""
        model = load_hf_model(hf_dir, torch.float32, "sdpa")
        stored = {name: names_in_files(model)[name] for name, _ in model.named_parameters()}
        if step:
            if unknown := set(step.names) - set(stored.values()):
                raise UserError(
                    f"{step.spec} changed {sorted(unknown)[:3]}, no parameters of {hf_dir}; measure it again"
                )
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if stored[name] in step.names:
                        held = step.quantized[stored[name]]
                        weight.copy_(held.read(0, held.shape[0]).view_as(weight))
        model.to(self._ranks.device)  # type: ignore[arg-type]
        return SequenceLosses(model, self._tokens_BS1, self._batch_size), stored


def _through_checkpoints(base: SequenceLosses, hf_dir: Path, ends: Ends, files: _Files) -> _Directions:
    previous, stored = files.open(ends.previous)
    direct = {"previous": previous()}
    check_finite(str(ends.previous), direct["previous"], FINITE)
    with torch.no_grad():
        first = {name: previous.weights[name] - weight for name, weight in base.weights.items()}
    del previous
    step = read_step(hf_dir, ends.quantized)
    direct["quantized"] = files.open(hf_dir, step)[0]()
    check_finite(str(ends.quantized), direct["quantized"], FINITE)
    deltas = {name: step.delta(file) for name, file in stored.items()}
    second = {
        name: delta.view_as(base.weights[name]).to(base.weights[name].device)
        for name, delta in deltas.items()
        if delta is not None
    }
    settings = {
        "plane": "checkpoints",
        "previous": identify(ends.previous),
        "quantized": {"path": str(ends.quantized), "spec": step.spec},
    }
    return _Directions(first, second, direct, settings)


def _random(base: SequenceLosses, seed: int) -> _Directions:
    first, second = (filter_normalised(base.weights, seed, index) for index in range(2))
    return _Directions(first, second, {}, {"plane": "random, filter-normalised"})


def _points(named: list[Point], losses_QB: Tensor, direct: dict[str, Tensor]) -> list[dict[str, Any]]:
    """The named points with their losses on the plane, and how far those are from the losses of their own files.

    Raises:
        UserError: one of them is too far.
    """
    rows = []
    for index, ((name, direct_B), point) in enumerate(zip(direct.items(), named, strict=True)):
        loss, error = mean_and_error(losses_QB[index])
        increase, increase_error = mean_and_error(losses_QB[index] - losses_QB[0])
        from_files = float(direct_B.mean())
        difference = abs(loss - from_files) / from_files
        if not difference <= POINT_TOLERANCE:
            raise UserError(
                f"the {name} point has loss {loss:.7g} on the plane and {from_files:.7g} from its own files, "
                f"{difference:.1e} apart (at most {POINT_TOLERANCE:g}): not the same weights; export or quantize again"
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


def measure(hf_dir: Path, spec: SliceSpec, data_prefix: Path, ends: Ends | None, ranks: Ranks) -> dict[str, Any]:
    """The content of result.json: of the plane through `ends`, or of a random one. Writes nothing.

    Raises:
        UserError: models, text and settings do not fit, a loss is not finite, or a point of the plane does not have
            the loss of its files.
    """
    identity = identify(hf_dir)
    if ends:
        _check_same_configuration(hf_dir, ends.previous)
    clock = time.perf_counter()
    batches = Batches(
        data_prefix,
        read_config(hf_dir),
        sequence_length=spec.sequence_length,
        seed=spec.seed,
        needed=spec.sequences,
        option="--sequences",
    )
    tokens_BS1 = batches.number(0, spec.sequences)
    files = _Files(tokens_BS1, spec, ranks)
    base, _ = files.open(hf_dir)
    base_B = base()
    check_finite(str(hf_dir), base_B, FINITE)
    theta_norm = math.sqrt(dot(base.weights, base.weights))
    directions = _through_checkpoints(base, hf_dir, ends, files) if ends else _random(base, spec.seed)
    measured = _plane(base, base_B, directions, theta_norm, spec, ranks)
    settings = directions.settings
    del directions  # two copies of the weights, the ascent needs others
    measured["sam"] = sam_sharpness(base, base_B, theta_norm, spec.radii, spec.sam_steps, ranks)
    measured["parameters"] = sum(weight.numel() for weight in base.weights.values())
    measured["theta_norm"] = theta_norm
    text = {"sequence_length": batches.sequence_length, "data": batches.described}
    return {
        "model": identity,
        "spec": spec.model_dump(mode="json") | settings | text | {"precision": "fp32", "attention": "sdpa"},
        "measured": measured | {"units": UNITS},
        "environment": environment() | {"seconds": time.perf_counter() - clock},
    }


def _plane(
    base: SequenceLosses, base_B: Tensor, directions: _Directions, theta_norm: float, spec: SliceSpec, ranks: Ranks
) -> dict[str, Any]:
    """The named points and the grid; the model is back at the base afterwards."""
    plane = Plane(base.weights, directions.first, directions.second)
    direct = {"base": base_B} | directions.direct
    origin = Point(0.0, 0.0)
    named = [origin, *plane.ends][: len(direct)]
    near_QB = losses_at(plane, base, named + rounding_points(theta_norm), ranks, "points")
    points = _points(named, near_QB, direct)  # refused before the grid is paid for
    rounding = rounding_of(near_QB[len(named) :], near_QB[0])

    margin = spec.extent * max(math.hypot(*end) for end in plane.ends)
    x_X, y_Y = (grid_coordinates([point[axis] for point in named], margin, spec.grid) for axis in range(2))
    grid_QB = losses_at(plane, base, [Point(x, y) for y in y_Y for x in x_X], ranks, "grid")
    plane.move(origin)
    grid_YXB = grid_QB.view(spec.grid, spec.grid, -1)
    return {
        "points": points,
        "directions": {"lengths": [math.hypot(*end) for end in plane.ends], "cosine": plane.cosine},
        "grid": {"x": x_X, "y": y_Y, "loss": grid_YXB.mean(dim=-1).tolist()},
        "curvature": {
            "x": second_difference(grid_YXB[y_Y.index(0.0)], x_X, rounding)._asdict(),
            "y": second_difference(grid_YXB[:, x_X.index(0.0)], y_Y, rounding)._asdict(),
        },
        "rounding": rounding,
    }


UNITS = {
    "points.x, points.y, grid.x, grid.y, directions.lengths, sam.radii.radius": "Euclidean distance of the parameters",
    "points.loss, points.increase, points.losses, grid.loss": "nats per token",
    "points.relative_difference": "of loss (on the plane) to loss_from_files (the point's own)",
    "curvature": "nats per token per squared distance; rounding: the s.d. that fp32 alone gives",
    "rounding": "nats per token, root mean square of second differences at steps too small for curvature",
    "sam.gradient_norm": "nats per token per distance",
    "sam.radii.relative_radius": "of theta_norm",
    "sam.radii.first_order, sam.radii.sharpness": "nats per token; errors over sequences, for the direction found",
}
