"""The room that a study takes on the disk, before anything starts."""

import math
import os
import shutil
from contextlib import suppress
from pathlib import Path

from base.errors import UserError
from study.axes import AnyRun
from study.definition import Study
from study.machine.released_size import linear_parameters, stored_bytes
from study.measurements.quantization import BLOCKS
from study.paths import last_model
from study.released import ReleasedRun
from train.model.config import hidden_matrices, parameter_shapes
from train.planning.memory import bytes_of_weight, checkpoint_bytes, parameter_count
from train.planning.optimizer_states import FP32
from train.run.directory import RunDirectory

GB = 1e9
CHECKPOINTS, RESTARTS = "checkpoints", "restart checkpoints"
EXPORTS, DENSE = "exports", "quantized weights"
RELEASED = "released models"


def _linear_parameters(run: AnyRun) -> int:
    """Return the parameters of the linears in the decoder blocks; 0 where nothing states them."""
    if isinstance(run, ReleasedRun):
        return linear_parameters(run.config) if run.config else 0
    shapes = parameter_shapes(run.model)
    return sum(math.prod(shapes[name]) for name in hidden_matrices(run.model))


def _dense_by_block(study: Study, run: AnyRun) -> int:
    """Return of how many specs the weights at the end of a run are kept for its blocks."""
    kinds = [each.kind for each in study.measured(run)[last_model(run)]]
    return len(study.quantization.by_block) if BLOCKS in kinds else 0


def needed_bytes(study: Study) -> dict[str, int]:
    """Return the bytes of what a whole study leaves on disk, by kind.

    Permanent checkpoints and averages; every exported model; what `--dense` keeps of the linears in
    fp32; released models and their averages. Of a released model it is as far as config.json states
    its size. Token files, results and logs are not counted.
    """
    runs = study.trained
    models = {run.name: len(study.models_of(run)) for run in runs}
    by_block = {run.name: _dense_by_block(study, run) for run in study.runs}
    # Each once, however many planes go through it.
    points = {point for plane in study.resolved_planes for point in plane.points.values()}
    quantized = [point.run for point in points if point.spec]
    released = [run for run in study.runs if isinstance(run, ReleasedRun)]
    exports = sum(models[run.name] * parameter_count(run) * bytes_of_weight(run) for run in runs)
    return {
        CHECKPOINTS: sum(checkpoint_bytes(run).kept for run in runs),
        EXPORTS: exports,
        DENSE: sum(
            kept * _linear_parameters(run) * FP32
            for run in study.runs
            if (kept := by_block[run.name] + quantized.count(run.name))
        ),
        RELEASED: sum(
            (len(study.models_of(run)) + len(run.ingredients)) * stored_bytes(run.config)
            for run in released
            if run.config
        ),
    }


def restart_bytes(study: Study, at_once: int) -> int:
    """Return the most bytes of restart checkpoints while so many runs train; none stay."""
    # The worst case: the runs with the largest ones train at the same time.
    rotated = sorted((checkpoint_bytes(run).rotated for run in study.trained), reverse=True)
    return sum(rotated[:at_once])


def _size_of(directory: Path) -> int:
    """Return the bytes of the files below a directory."""
    size = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):  # it went meanwhile
                # half the time that Path takes
                size += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118
    return size


def gigabytes(size: float) -> str:
    """Return bytes in GB, with two digits at least, so that little is not nothing.

    >>> gigabytes(46e6), gigabytes(12.34e9), gigabytes(0)
    ('0.046', '12.3', '0')
    """
    return f"{size / GB:,.1f}" if size >= GB else f"{size / GB:.2g}"


def check_room(
    study: Study, root: Path, reserve_gb: float = 0.0, *, at_once: int | None = None
) -> None:
    """Raise UserError for a study that the filesystem of `root` has no room for.

    Counted is what still has to be written, with the restart checkpoints of the runs that train
    `at_once`, by default all of them, and what is to be left free.
    """
    needed = needed_bytes(study)
    needed[RESTARTS] = restart_bytes(study, at_once or len(study.runs))
    present = dict.fromkeys(needed, 0)
    for run in study.runs:
        directory = RunDirectory(root / study.name / run.name)
        # Quantized weights are below the models and are counted as a kind of their own.
        dense = sum(_size_of(path) for path in directory.hf.glob("*/*/*/dense"))
        present[CHECKPOINTS] += _size_of(directory.checkpoints)
        present[RESTARTS] += _size_of(directory.restarts)
        models = RELEASED if isinstance(run, ReleasedRun) else EXPORTS
        present[models] += _size_of(directory.hf) - dense
        present[DENSE] += dense
    # What is there already is not written again; kind by kind, as one does not pay for another.
    missing = {kind: max(0, size - present[kind]) for kind, size in needed.items()}
    # The root need not exist yet: its nearest parent is on the same filesystem.
    there = next(parent for parent in (root, *root.parents) if parent.exists())
    free = shutil.disk_usage(there).free  # quotas of Lustre and the like do not show in it
    if sum(missing.values()) + reserve_gb * GB <= free:
        return
    parts = ", ".join(f"{kind} {gigabytes(size)}" for kind, size in missing.items() if size)
    reserved = f", of which {gigabytes(reserve_gb * GB)} GB are reserved" if reserve_gb else ""
    raise UserError(
        f"{study.name} will write {gigabytes(sum(missing.values()))} GB more ({parts}), but"
        f" {root} has {gigabytes(free)} GB free{reserved}; free space, take a root on another"
        " filesystem, or save fewer checkpoints"
    )
