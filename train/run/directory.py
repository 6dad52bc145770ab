"""The files of a run: their paths, and the record of a checkpoint."""

import os
import re
from pathlib import Path
from typing import Any

from pydantic import Field

from base.errors import UserError
from base.files import FileRecord, check_inside
from base.frozen import Frozen
from base.reading import as_model, read_sealed
from train.model.precision import weights_dtype

CHECKPOINT_JSON = "checkpoint.json"
PROBE = "probe.safetensors"
PROBE_SEQUENCES, PROBE_TOKENS = 2, 32  # or fewer tokens where sequences are shorter
PROBE_OUTPUTS = "outputs/"  # begins a key of the probe, before the HF name of a module
# The weights of HF directories and DeepSpeed checkpoints, whole tensors by HF name: in one file, or
# in several with their index.
MODEL_WEIGHTS = "model.safetensors"
MODEL_INDEX = "model.safetensors.index.json"
# Directory of an imported checkpoint with configuration and tokenizer of its source.
IMPORTED_FROM = "hf"
RESTORE = (
    "restore it, or give another checkpoint: 'python -m train run' makes the newest of a run again"
)


class CheckpointRecord(Frozen):
    """checkpoint.json, written last: a checkpoint without it does not exist."""

    run: str
    fingerprint: str
    step: int
    tokens: int
    learning_rate: float
    # Losses in nats per token. Of training: None at step 0 and for an average.
    train_loss: float | None
    held_out_loss: float | None  # None where a restart checkpoint was not evaluated
    more_held_out_losses: dict[str, float] = Field(default={})  # by name of the file
    engine: str
    precision: str
    world_size: int
    layout: dict[str, int]  # tensor, pipeline, data
    attempt: int
    # Version of this project that wrote it. None: before 0.2.0, or an import, whose record is of
    # its source alone.
    quantdyn: str | None = None
    data_sha256: dict[str, str]  # of the tokens: train, held_out, held_out.NAME
    model: dict[str, Any]
    # Kind, interval_steps, window or decay, and steps; None: the weights are not averaged.
    average: dict[str, Any] | None = None
    # True: training cannot resume from it. So it is of averages and imports, said or not.
    weights_only: bool = False
    # Source, revision and hashes, if it was made from an HF directory.
    imported: dict[str, Any] | None = None
    # By average: the step after which its first member may be.
    average_starts: dict[str, int] = Field(default={})
    # Losses and gradient norms of the steps by which the next one is judged; skips just before.
    judged_steps: tuple[tuple[float, float], ...] = ()
    skips_in_a_row: int = 0
    files: dict[str, FileRecord]

    @property
    def is_full(self) -> bool:
        """True where it holds optimizer state and the memory of averages: training can resume."""
        return not (self.weights_only or self.average or self.imported)

    @property
    def dtype(self) -> str:
        """The type of the weights."""
        return weights_dtype(self.engine, self.precision)


def step_name(step: int) -> str:
    """Return the directory name of a step: step00012000."""
    return f"step{step:08d}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint, or of an average, by its directory's name.

    >>> step_of("step00012000"), step_of("lawa5x500-step00000100")
    (12000, 100)
    """
    return int(name.rpartition("step")[2])


def _complete_steps(parent: Path) -> list[int]:
    names = [path.parent.name for path in parent.glob(f"step*/{CHECKPOINT_JSON}")]
    # Averages have names that begin otherwise, and unfinished directories begin with a point.
    return sorted(int(name[4:]) for name in names if re.fullmatch(r"step\d{8,}", name))


class RunDirectory:
    """The paths of one run. Names are made and found here and nowhere else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_json = path / "run.json"
        self.environment_json = path / "environment.json"
        self.metrics = path / "metrics.jsonl"
        self.ranks = path / "ranks.jsonl"
        self.watch = path / "watch"
        self.flight_recorder = self.watch / "flight_recorder_"  # torch adds the rank
        self.profile = path / "profile"
        self.status_json = path / "status.json"
        self.stop_file = path / "STOP"
        self.checkpoints = path / "checkpoints"
        self.restarts = path / "restarts"
        self.quarantine = path / "quarantine"
        self.hf = path / "hf"
        self.order = path / "order"  # of the training sequences, where it has to be stored

    def checkpoint(self, step: int) -> Path:
        """Return the directory of the checkpoint after update `step`."""
        return self.checkpoints / step_name(step)

    def complete_steps(self) -> list[int]:
        """Return the steps with a complete permanent checkpoint, rising."""
        return _complete_steps(self.checkpoints)

    def restart(self, step: int) -> Path:
        """Return the directory of the restart checkpoint after update `step`."""
        return self.restarts / step_name(step)

    def complete_restarts(self) -> list[int]:
        """Return the steps with a complete restart checkpoint, rising."""
        return _complete_steps(self.restarts)

    def average_name(self, name: str, step: int) -> str:
        """Return the directory name of an average: lawa5x500-step00012000."""
        return f"{name}-{step_name(step)}"

    def average_checkpoint(self, name: str, step: int) -> Path:
        """Return the directory of the checkpoint of an average as of update `step`."""
        return self.checkpoints / self.average_name(name, step)

    def heartbeat(self, rank: int) -> Path:
        """Return the file of a rank's heartbeat, which shows that it is alive."""
        return self.watch / f"rank{rank}.json"

    def stacks(self, rank: int) -> Path:
        """Return the file with the stacks of a rank that the watchdog has ended."""
        return self.watch / f"rank{rank}.stacks"

    def resolve(self, path: str) -> Path:
        """Return a path of run.json, relative to the run directory, as an absolute one."""
        return Path(os.path.normpath(self.path.absolute() / path))


def read_checkpoint_record(checkpoint: Path) -> CheckpointRecord:
    """Read checkpoint.json without touching the shards; UserError if it was changed."""
    path = checkpoint / CHECKPOINT_JSON
    try:
        record = as_model(CheckpointRecord, read_sealed(path, RESTORE), path)
    except FileNotFoundError:
        raise UserError(
            f"{checkpoint} holds no {CHECKPOINT_JSON}: it is not a complete checkpoint;"
            " give another"
        ) from None
    check_inside(path, record.files)
    return record
