"""Runs of others: stages of a released model, fetched instead of trained."""

from itertools import pairwise
from typing import Self

from pydantic import Field, model_validator

from base.frozen import NAME_PATTERN, Frozen


class ReleasedRevision(Frozen):
    """One released checkpoint; what no source tells is None."""

    name: str = Field(
        pattern=NAME_PATTERN, description="of the branch on the hub, or of the directory"
    )
    step: int = Field(ge=0)
    tokens: int | None = Field(default=None, ge=0)
    learning_rate: float | None = Field(default=None, ge=0)


class ReleasedRun(Frozen):
    """One stage of a released model, as one line of the figures."""

    name: str = Field(pattern=NAME_PATTERN, description="of the stage")
    source: str = Field(
        description="OWNER/NAME on the hub, or a directory with a directory per revision"
    )
    family: str | None = Field(
        default=None, description="repository whose naming a local directory has"
    )
    schedule: str | None = Field(default=None, description="where its learning rates come from")
    revisions: tuple[ReleasedRevision, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _rising(self) -> Self:
        for earlier, later in pairwise(self.revisions):
            if later.step <= earlier.step:
                raise ValueError(f"the steps of {self.name} do not rise at {later.name}")
        return self

    @property
    def save_steps(self) -> tuple[int, ...]:
        """The steps of its checkpoints."""
        return tuple(revision.step for revision in self.revisions)

    @property
    def total_steps(self) -> int:
        """The last of its steps."""
        return self.revisions[-1].step

    @property
    def peak_lr(self) -> float | None:
        """The largest known learning rate; None where none is known."""
        return max(
            (
                revision.learning_rate
                for revision in self.revisions
                if revision.learning_rate is not None
            ),
            default=None,
        )

    def at(self, step: int) -> ReleasedRevision:
        """Return the checkpoint of a step."""
        return next(revision for revision in self.revisions if revision.step == step)
