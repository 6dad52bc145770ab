"""The room that a study takes on the disk, before anything starts."""

import math
import os
from pathlib import Path

from base.errors import UserError
from study.definition import Study
from train.model.families import parameter_shapes
from train.planning.memory import FP32, bytes_of_weight, checkpoint_bytes, parameter_count
from train.run.config import RunConfig
from train.run.directory import RunDirectory

GB = 1e9
CHECKPOINTS, EXPORTS, DENSE = "checkpoints", "exports", "quantized weights"


def _linear_parameters(run: RunConfig) -> int:
    """Return the parameters of the linears in the decoder blocks."""
    shapes = parameter_shapes(run.model).items()
    return sum(math.prod(shape) for name, shape in shapes if len(shape) == 2 and ".layers." in name)


def needed_bytes(study: Study) -> dict[str, int]:
    """Return the bytes of what a whole study leaves on disk, by kind.

    Checkpoints with optimizer state, restart checkpoints and averages; every exported model; what
    `--dense` keeps of the linears in fp32. Token files, results, logs and models that are
    downloaded are not counted.
    """
    runs = study.trained
    models = {run.name: len(study.models_of(run)) for run in runs}
    specs = len(study.quantization.by_block)
    exports = sum(models[run.name] * parameter_count(run) * bytes_of_weight(run) for run in runs)
    return {
        CHECKPOINTS: sum(checkpoint_bytes(run).trajectory for run in runs),
        EXPORTS: exports,
        DENSE: sum(specs * _linear_parameters(run) * FP32 for run in runs),
    }


def _size_of(directory: Path) -> int:
    """Return the bytes of the files below a directory."""
    size = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                # half the time that Path takes
                size += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118
            except FileNotFoundError:  # it went meanwhile
                continue
    return size


def present_bytes(study: Study, study_dir: Path) -> dict[str, int]:
    """Return the bytes that are in the study's directory, of no kind more than it needs."""
    found = dict.fromkeys((CHECKPOINTS, EXPORTS, DENSE), 0)
    for run in study.trained:
        directory = RunDirectory(study_dir / run.name)
        dense = sum(_size_of(path) for path in directory.hf.glob("*/blocks/*/dense"))
        found[CHECKPOINTS] += _size_of(directory.checkpoints) + _size_of(directory.restarts)
        found[EXPORTS] += _size_of(directory.hf) - dense
        found[DENSE] += dense
    needed = needed_bytes(study)
    return {kind: min(size, needed[kind]) for kind, size in found.items()}


def _free_bytes(directory: Path) -> int:
    """Return what can still be written there; quotas of Lustre and the like do not show in it."""
    there = next(parent for parent in (directory, *directory.parents) if parent.exists())
    status = os.statvfs(there)
    return status.f_bavail * status.f_frsize


def check_room(
    study: Study, root: Path, reserve_gb: float = 0.0, *, only: str | None = None
) -> None:
    """Raise UserError for a study, or one run of it, that the filesystem of `root` has no room for.

    Counted is what still has to be written, and what is to be left free.
    """
    if only:
        runs = tuple(run for run in study.runs if run.name == only)
        study = study.model_copy(update={"runs": runs})
    needed, present = needed_bytes(study), present_bytes(study, root / study.name)
    missing = {kind: needed[kind] - present[kind] for kind in needed}
    free = _free_bytes(root)
    if sum(missing.values()) + reserve_gb * GB <= free:
        return
    parts = ", ".join(f"{kind} {size / GB:,.1f}" for kind, size in missing.items() if size)
    reserved = f", of which {reserve_gb:,.1f} GB are reserved" if reserve_gb else ""
    raise UserError(
        f"{only or study.name} will write {sum(missing.values()) / GB:,.1f} GB more ({parts}), but"
        f" {root} has {free / GB:,.1f} GB free{reserved}; free space, take a root on another"
        " filesystem, or save fewer checkpoints"
    )
