"""Whether a study fits on the disk, before anything is submitted."""

import math
import os
from pathlib import Path

from study.settings import Study
from train.command import UserError
from train.config import RunConfig
from train.families import parameter_shapes
from train.memory import FP32, bytes_of_weight, checkpoint_bytes, parameter_count
from train.run_directory import RunDirectory

GB = 1e9
CHECKPOINTS, EXPORTS, DENSE = "checkpoints", "exports", "quantized weights"


def _trained(study: Study) -> list[RunConfig]:
    """The runs that are trained; of released models' trajectories the size is not known before they are there."""
    return [run for run in study.runs if isinstance(run, RunConfig)]


def _linear_parameters(run: RunConfig) -> int:
    """Parameters of the linears in the decoder blocks."""
    shapes = parameter_shapes(run.model)
    return sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and ".layers." in name)


def needed_bytes(study: Study) -> dict[str, int]:
    """Bytes of what a whole study leaves on disk, by kind.

    Checkpoints with optimizer state, restart checkpoints and averages; every exported model; what `--dense` keeps of
    the linears in fp32. Token files, results, logs and models that are downloaded are not counted.
    """
    runs = _trained(study)
    models = {run.name: len(study.models_of(run)) for run in runs}
    specs = len(study.quantization.by_block)
    return {
        CHECKPOINTS: sum(checkpoint_bytes(run).trajectory for run in runs),
        EXPORTS: sum(models[run.name] * parameter_count(run) * bytes_of_weight(run) for run in runs),
        DENSE: sum(specs * _linear_parameters(run) * FP32 for run in runs),
    }


def _size_of(directory: Path) -> int:
    """Bytes of the files below a directory; 0 if there is none. A file that goes meanwhile counts nothing."""
    size = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118  half the time of Path
            except FileNotFoundError:
                continue
    return size


def present_bytes(study: Study, study_dir: Path) -> dict[str, int]:
    """Bytes of what already lies in the study's directory, by kind, and of no kind more than it needs."""
    found = dict.fromkeys((CHECKPOINTS, EXPORTS, DENSE), 0)
    for run in _trained(study):
        directory = RunDirectory(study_dir / run.name)
        dense = sum(_size_of(path) for path in directory.hf.glob("*/blocks/*/dense"))
        found[CHECKPOINTS] += _size_of(directory.checkpoints) + _size_of(directory.restarts)
        found[EXPORTS] += _size_of(directory.hf) - dense
        found[DENSE] += dense
    needed = needed_bytes(study)
    return {kind: min(size, needed[kind]) for kind, size in found.items()}


def _free_bytes(directory: Path) -> int:
    """What a user can still write there, or where it will be. Quotas of Lustre and the like do not show in it."""
    there = next(parent for parent in (directory, *directory.parents) if parent.exists())
    status = os.statvfs(there)
    return status.f_bavail * status.f_frsize


def check_room(study: Study, root: Path, reserve_gb: float) -> None:
    """UserError if the filesystem of `root` has no room for what the study still has to write, and the reserve."""
    needed, present = needed_bytes(study), present_bytes(study, root / study.name)
    missing = {kind: needed[kind] - present[kind] for kind in needed}
    free = _free_bytes(root)
    if sum(missing.values()) + reserve_gb * GB <= free:
        return
    parts = ", ".join(f"{kind} {size / GB:,.1f}" for kind, size in missing.items() if size)
    raise UserError(
        f"{study.name} will write {sum(missing.values()) / GB:,.1f} GB more ({parts}), but {root} has "
        f"{free / GB:,.1f} GB free, of which {reserve_gb:,.1f} GB are reserved; free space, take a root on another "
        "filesystem, or save fewer checkpoints"
    )
