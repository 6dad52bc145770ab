"""Settings of saving: when, and what permanent checkpoints hold; a part of `train.run.config`."""

from typing import Self

from pydantic import Field, model_validator

from base.frozen import Frozen


class SavingConfig(Frozen):
    """Settings of saving. Permanent checkpoints stay; restart checkpoints are rotated.

    A restart checkpoint holds all that training resumes from. A permanent one may hold the weights
    alone, as the model computes with them: exports, and averages of exports, read nothing else.
    """

    asynchronous: bool = False
    restart_every_steps: int | None = Field(
        default=None, gt=0, description="None: only permanent ones"
    )
    restart_keep: int = Field(
        default=2,
        gt=1,
        description="restart checkpoints kept; the older ones are removed, at the run's end all",
    )
    full_steps: tuple[int, ...] | None = Field(
        default=None,
        description=(
            "those of save_steps that keep optimizer state and averages' memory, which a branch"
            " continues; the others keep weights. None: all keep it"
        ),
    )
    average_steps: tuple[int, ...] | None = Field(
        default=None, description="those of save_steps at which averages are written; None: all"
    )

    @model_validator(mode="after")
    def _resumable(self) -> Self:
        if self.full_steps is not None and self.restart_every_steps is None:
            raise ValueError(
                "with saving.full_steps a crash could lose the whole run; set"
                " saving.restart_every_steps too"
            )
        return self

    def keeps_state(self, step: int) -> bool:
        """Return whether training may resume from the permanent checkpoint of a step."""
        return self.full_steps is None or step in self.full_steps

    def writes_averages(self, step: int) -> bool:
        """Return whether a step with a permanent checkpoint has checkpoints of averages."""
        return self.average_steps is None or step in self.average_steps
