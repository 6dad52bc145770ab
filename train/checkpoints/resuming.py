"""The beginning of an attempt: load the newest undamaged checkpoint, else the run's own origin.

The origin is the checkpoint that it branches from, an imported one (`RunConfig.start_from`), or its
initial weights. `python -m ckpt_tools import` makes an imported one: weights in HF's form, and the
logits that transformers computes with them. `train.loop` calls `resume`.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from base.digests import digest_of
from base.errors import UserError
from base.files import first_damage, sha256_of
from base.frozen import fingerprint
from train.data.tokenizer import TOKENIZER_JSON
from train.distributed import from_rank_zero, gathered
from train.engine import Engine
from train.model.config import ModelConfig
from train.model.initialization import initial_parameter
from train.model.precision import dtype_of
from train.run.branching import check_parent
from train.run.config import RunConfig
from train.run.directory import (
    CHECKPOINT_JSON,
    IMPORTED_FROM,
    PROBE,
    CheckpointRecord,
    RunDirectory,
    read_checkpoint_record,
)


def resume(
    engine: Engine,
    run: RunConfig,
    directory: RunDirectory,
    *,
    data_sha256: dict[str, str],
    attempt: int,
) -> tuple[int, CheckpointRecord | None, list[int]]:
    """Load the newest full checkpoint, permanent or restart, that is undamaged. All ranks call.

    A damaged one is moved to RUN/quarantine, and the one before it is tried. A run at its end needs
    no state: weights alone are enough there, and nothing is loaded.

    Returns:
        The updates already made, the record of the checkpoint that was loaded (None at the initial
        weights), and the steps whose damaged checkpoint was moved away.

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
            # Training cannot resume from weights alone; at the last step nothing is left to train.
            if not record.is_full and step < run.total_steps:
                continue
            damage = _damage(checkpoint, record)
        if record and not damage:
            if record.is_full:
                engine.load(checkpoint)
            return step, record, quarantined
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
        return run.branch_from.step, record, []
    if run.start_from:
        checkpoint = imported_checkpoint(run, directory)
        record = _undamaged(checkpoint, "import the model again")
        start_from_import(engine, run, directory, checkpoint, record)
    else:
        engine.start_from(
            lambda name: initial_parameter(name, run.model, run.seed, run.scaling_of(name).initial)
        )
    return 0, None, []


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
    of_node = from_rank_zero(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    sizes = {name: file.bytes for name, file in record.files.items()}
    mine = dealt(sizes, dist.get_world_size(), of_node)[dist.get_rank()]
    damages = gathered(first_damage(checkpoint, {name: record.files[name] for name in mine}))
    return next((damage for damage in damages if damage), None)


def dealt(sizes: Mapping[str, int], ranks: int, of_node: int) -> list[list[str]]:
    """Return the names for each rank, dealt by falling size, in turn to one rank of every node.

    A checkpoint of fewer ranks has fewer and larger files: nodes read them side by side.

    >>> dealt({"a": 1, "b": 9, "c": 8}, ranks=4, of_node=2)
    [['b'], ['a'], ['c'], []]
    """
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    turns = sorted(range(ranks), key=lambda rank: (rank % of_node, rank))
    return [names[turns.index(rank) :: ranks] for rank in range(ranks)]


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
    # A permanent and a restart checkpoint of one step have the same name.
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


# Norm of the logits' difference over the norm of the logits. In fp32 it is the order of sums; in
# bf16 activations are rounded to 8 bits of mantissa.
LOGIT_TOLERANCE = {"fp32": 1e-5, "bf16": 5e-2}
DRAWING = {"initializer", "initializer_range"}  # of a model: how weights are drawn


def imported_checkpoint(run: RunConfig, directory: RunDirectory) -> Path:
    """Return the checkpoint that a run starts from; UserError unless run.json names this one."""
    assert run.start_from
    checkpoint = directory.resolve(run.start_from.checkpoint)
    path = checkpoint / CHECKPOINT_JSON
    if not path.is_file():
        raise UserError(
            f"start_from names no checkpoint, {checkpoint}; make it with 'ckpt_tools import'"
        )
    if sha256_of(path) != run.start_from.sha256:
        raise UserError(f"{path} has another SHA-256 than start_from names; import the model again")
    return checkpoint


def start_from_import(
    engine: Engine,
    run: RunConfig,
    directory: RunDirectory,
    checkpoint: Path,
    record: CheckpointRecord,
) -> None:
    """Load the weights of an imported checkpoint, whose hashes were checked. All ranks call.

    Raises:
        UserError: it is of another model or tokenizer, or the engine computes other logits from its
            weights.
    """
    if record.imported is None:
        raise UserError(
            f"{checkpoint} was not imported; name a run's checkpoint in branch_from instead"
        )
    model, imported = run.model, ModelConfig.model_validate(record.model)
    for key in type(model).model_fields:
        if key not in DRAWING and getattr(model, key) != getattr(imported, key):
            raise UserError(
                f"model.{key} is {getattr(model, key)} in run.json, {getattr(imported, key)} in"
                f" {checkpoint}; set it so"
            )
    tokenizer = record.files.get(f"{IMPORTED_FROM}/{TOKENIZER_JSON}")
    tokenizer_json = directory.resolve(run.data.tokenizer) / TOKENIZER_JSON
    if tokenizer and digest_of(tokenizer_json, tokenizer.algorithm) != tokenizer.digest:
        raise UserError(
            f"{tokenizer_json} is not the tokenizer of {checkpoint}; set data.tokenizer to"
            f" {checkpoint / IMPORTED_FROM} and prepare the data with it"
        )
    engine.start_from(_reader(checkpoint))
    _check_logits(engine, run, checkpoint)


def _reader(checkpoint: Path) -> Callable[[str], Tensor]:
    """Return a reader of whole tensors in fp32 by HF name."""
    places: dict[str, Path] = {}
    # Only the place of each tensor is kept: a rank never reads the whole model at once.
    for path in sorted(checkpoint.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            places |= dict.fromkeys(file.keys(), path)

    def read(name: str) -> Tensor:
        with safe_open(places[name], "pt") as file:
            weight: Tensor = file.get_tensor(name)
            return weight.float()

    return read


def _check_logits(engine: Engine, run: RunConfig, checkpoint: Path) -> None:
    """Raise UserError unless the engine computes the logits that transformers did at import."""
    probe = load_file(checkpoint / PROBE)
    length = run.data.sequence_length
    logits = engine.probe(probe["input_ids"][:, :length]).get("logits")
    ratio = 0.0
    if dist.get_rank() == 0:
        assert logits is not None
        expected = probe["logits"][:, :length]
        ratio = ((logits - expected).norm() / expected.norm()).item()
    ratio = float(from_rank_zero(ratio))
    allowed = LOGIT_TOLERANCE[dtype_of(run.precision)]  # of a probe, which has no 8-bit products
    # Written with `not`, so that NaN is refused as well.
    if not ratio <= allowed:
        raise UserError(
            f"the engine's logits differ from those of {checkpoint} by {ratio:.3g} of their norm,"
            f" allowed is {allowed:g}; report it"
        )
