"""The beginning of an attempt: load the newest undamaged checkpoint, else the run's own origin.

The origin is the checkpoint that it branches from, an imported one (`train.checkpoints.starting`),
or its initial weights. `train.loop` calls `resume`.
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from base.errors import UserError
from base.files import first_damage
from base.frozen import fingerprint
from train.checkpoints import starting
from train.distributed import from_rank_zero, gathered
from train.engine import Engine
from train.model.initialization import initial_parameter
from train.run.branching import check_parent
from train.run.config import RunConfig
from train.run.directory import CheckpointRecord, RunDirectory, read_checkpoint_record


class Start(NamedTuple):
    """The state from which an attempt trains.

    Attributes:
        step: the updates already made.
        record: of the checkpoint that was loaded; None at the initial weights.
        quarantined: steps whose damaged checkpoint was moved away.
    """

    step: int
    record: CheckpointRecord | None
    quarantined: list[int]


def resume(
    engine: Engine,
    run: RunConfig,
    directory: RunDirectory,
    *,
    data_sha256: dict[str, str],
    attempt: int,
) -> Start:
    """Load the newest full checkpoint, permanent or restart, that is undamaged. All ranks call.

    A damaged one is moved to RUN/quarantine, and the one before it is tried. A run at its end needs
    no state: weights alone are enough there, and nothing is loaded.

    Raises:
        UserError: all are damaged, or the newest is of another configuration or other data, or it
            does not fit the layout.
    """
    # Rank 0 lists them: on a shared file system ranks might not all see the same.
    candidates = from_rank_zero(_candidates(directory) if dist.get_rank() == 0 else None)
    quarantined: list[int] = []
    for step, checkpoint in candidates:
        record, damage = _record(checkpoint)
        if record:
            _check_belongs(checkpoint, record, run, data_sha256)
            if not record.is_full and step < run.total_steps:
                continue
            damage = _damage(checkpoint, record)
        if record and not damage:
            if record.is_full:
                engine.load(checkpoint)
            return Start(step, record, quarantined)
        quarantined.append(step)
        if dist.get_rank() == 0:
            _quarantine(directory, checkpoint, attempt, str(damage))

    # Beginning again would hide that checkpoints were lost.
    if from_rank_zero(directory.quarantine.is_dir()):
        raise UserError(
            f"no checkpoint of {directory.path} is undamaged; restore one from"
            f" {directory.quarantine}, or move that directory away to begin again"
        )

    # The first attempt: a parent's checkpoint, an imported one, or drawn weights.
    if run.branch_from:
        record = _load_parent(engine, run, directory, data_sha256)
        return Start(run.branch_from.step, record, [])
    if run.start_from:
        checkpoint = starting.imported_checkpoint(run, directory)
        record = _undamaged(checkpoint, "import the model again")
        starting.start(engine, run, directory, checkpoint, record)
    else:
        engine.start_from(lambda name: initial_parameter(name, run.model, run.seed))
    return Start(0, None, [])


def _candidates(directory: RunDirectory) -> list[tuple[int, Path]]:
    """Return complete checkpoints, newest first, permanent before restart."""
    permanent = [(step, 1, directory.checkpoint(step)) for step in directory.complete_steps()]
    restarts = [(step, 0, directory.restart(step)) for step in directory.complete_restarts()]
    return [(step, path) for step, _, path in sorted(permanent + restarts, reverse=True)]


def _record(checkpoint: Path) -> tuple[CheckpointRecord | None, str | None]:
    """Return the record of a checkpoint, or why it cannot be read."""
    record, damage = None, None
    if dist.get_rank() == 0:
        try:
            record = read_checkpoint_record(checkpoint)
        except UserError as error:
            damage = str(error)
    record, damage = from_rank_zero((record, damage))
    return record, damage


def _damage(checkpoint: Path, record: CheckpointRecord) -> str | None:
    """Return the first damage of a file, or None. Ranks share the hashing."""
    mine = sorted(record.files)[dist.get_rank() :: dist.get_world_size()]
    damages = gathered(first_damage(checkpoint, {name: record.files[name] for name in mine}))
    return next((damage for damage in damages if damage), None)


def _undamaged(checkpoint: Path, next_action: str) -> CheckpointRecord:
    """Return the record of a checkpoint; UserError with the next action if it is damaged."""
    record, damage = _record(checkpoint)
    if record:
        damage = _damage(checkpoint, record)
    if not record or damage:
        raise UserError(f"{damage}; {next_action}")
    return record


def _check_belongs(
    checkpoint: Path, record: CheckpointRecord, run: RunConfig, data_sha256: dict[str, str]
) -> None:
    if record.fingerprint != fingerprint(run):
        raise UserError(
            f"{checkpoint} belongs to fingerprint {record.fingerprint}, run.json has"
            f" {fingerprint(run)}; use another run name for another configuration"
        )
    if record.data_sha256 != data_sha256:
        raise UserError(
            f"{checkpoint} was trained on other data than its run.json now points to; restore it"
        )


def _quarantine(directory: RunDirectory, checkpoint: Path, attempt: int, damage: str) -> None:
    directory.quarantine.mkdir(exist_ok=True)
    kind = "" if checkpoint.parent == directory.checkpoints else "-restart"
    target = directory.quarantine / f"{checkpoint.name}{kind}.attempt{attempt}"
    os.rename(checkpoint, target)
    print(f"warning: {' '.join(damage.split())}: moved to {target}", file=sys.stderr, flush=True)


def _load_parent(
    engine: Engine, run: RunConfig, directory: RunDirectory, data_sha256: dict[str, str]
) -> CheckpointRecord:
    """Load the checkpoint that a run branches from; it stays as it is."""
    assert run.branch_from
    parent = RunDirectory(directory.resolve(run.branch_from.run))
    check_parent(run, parent)
    checkpoint = parent.checkpoint(run.branch_from.step)
    record = _undamaged(checkpoint, "restore it, or branch from another checkpoint")
    # Other held-out files affect no update: a branch may have more of them than its parent.
    if any(record.data_sha256[use] != data_sha256[use] for use in ("train", "held_out")):
        raise UserError(
            f"{checkpoint} was trained on other data than {directory.path}; give it the same"
        )
    engine.load(checkpoint)
    return record
