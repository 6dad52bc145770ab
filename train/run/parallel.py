"""The configuration of parallelism."""

from typing import Literal, Self

from pydantic import Field, model_validator

from base.frozen import Frozen


class ParallelConfig(Frozen):
    """Model parallelism; the remaining ranks of the world are data-parallel."""

    tensor: int = Field(default=1, gt=0)
    pipeline: int = Field(default=1, gt=0)
    sequence: bool = Field(
        default=False, description="sequence parallelism within tensor-parallel ranks"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence needs tensor above 1")
        return self


class ZeroConfig(Frozen):
    """DeepSpeed's ZeRO (arXiv 1910.02054).

    Stage 1 shards optimizer state over ranks, 2 gradients too, 3 weights too.
    """

    stage: Literal[1, 2, 3] = 1
