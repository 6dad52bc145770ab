"""The settings of a model soup."""

from itertools import pairwise
from typing import Self

from pydantic import Field, model_validator

from base.frozen import NAME_PATTERN, Frozen
from ckpt_tools.emulated_decay import describe_decay
from train.run.config import RunConfig
from train.run.optimization import Shape


class SoupSettings(Frozen):
    """A model soup (arXiv 2203.05482): a mean of exported checkpoints of each run."""

    name: str = Field(pattern=NAME_PATTERN)
    steps: tuple[int, ...] = Field(
        min_length=2, description="permanent checkpoints that are averaged, rising"
    )
    decay: Shape | None = Field(
        default=None,
        description=(
            "shape of the learning rate's decay from the first step to the last that the weights of"
            " the mean emulate (arXiv 2507.17634); None: the uniform mean"
        ),
    )

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if any(later <= earlier for earlier, later in pairwise(self.steps)):
            raise ValueError(
                f"the steps of {self.name} do not rise; list each once, the first one first"
            )
        return self

    def describe(self) -> str:
        """Return the soup in words: 'soup of steps 560, 592 and 640'."""
        if self.decay:
            return describe_decay(self.steps, self.decay)
        *before, last = map(str, self.steps)
        return f"soup of steps {', '.join(before)} and {last}"

    def is_of(self, run: RunConfig) -> bool:
        """Return whether the soup is made of this run: it saves all its steps."""
        return set(self.steps) <= set(run.save_steps)
