"""status.json: how the last attempt of a run ended."""

from typing import Literal

from pydantic import Field

from base.files import write_sealed
from base.frozen import Frozen
from base.reading import as_model, read_sealed
from train.run.directory import RunDirectory

Ending = Literal["done", "diverged", "preempted", "failed"]


class Status(Frozen):
    """The end of an attempt. A run that diverged has ended: trained again, it does the same."""

    status: Ending
    step: int = Field(description="at which the attempt ended; of one that diverged, the bad one")
    attempt: int
    fingerprint: str = Field(description="of the run's configuration")
    reason: str
    loss: float | None = Field(
        default=None, description="of a step that diverged, nats per token; None: not finite"
    )
    asked_by: str | None = Field(default=None, description="who asked a preempted run to stop")
    time: float

    @property
    def words(self) -> str:
        """The divergence in words: 'lr1e5 diverged at step 2: not finite: loss nan'."""
        return self.reason.partition(";")[0]


def write_status(directory: RunDirectory, status: Status) -> None:
    """Write status.json."""
    write_sealed(directory.status_json, status.model_dump(mode="json"))


def read_status(directory: RunDirectory) -> Status | None:
    """Return status.json; None while an attempt runs, was killed, or none was made.

    UserError if it was changed after it was written.
    """
    path = directory.status_json
    try:
        return as_model(Status, read_sealed(path, "'python -m train run' writes it again"), path)
    except FileNotFoundError:
        return None


def divergence(directory: RunDirectory, fingerprint: str) -> Status | None:
    """Return the status of a run of this configuration that diverged; None for any other."""
    status = read_status(directory)
    diverged = status and status.status == "diverged" and status.fingerprint == fingerprint
    return status if diverged else None
