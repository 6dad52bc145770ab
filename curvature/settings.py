"""Settings of the measurements.

A study holds TraceSettings, PredictionSettings, PlaneSettings and LineSettings. The classes of the
commands, HutchinsonSettings, StepSettings, SliceSettings and CriticalSettings, add the devices,
which a study decides for each step. Fields that are excluded from results decide no number.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from base.errors import UserError
from base.frozen import Frozen

Count = Annotated[int, Field(ge=1)]
Several = Annotated[int, Field(ge=2)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class HessianSettings(Frozen):
    """Hessian-vector products, and the sequences that they are of."""

    microbatch_sequences: Count = Field(default=2, description="sequences of one product")
    sequence_length: Count | None = Field(
        default=None, description="tokens; by default the model's context"
    )
    seed: Seed = Field(default=0, description="of the probes and of the order of the sequences")
    dtype: Literal["fp32", "bf16"] = Field(
        default="fp32", description="precision of the products of matrices"
    )
    checkpointing: bool = Field(
        default=False, description="keep only the blocks' inputs: slower, far less memory"
    )
    vectors: Literal["device", "host"] = Field(
        default="device", description="memory that holds vectors over all weights"
    )


class EigenvalueSettings(HessianSettings):
    """The fixed batch of eigenvalues."""

    fixed_sequences: Count = Field(
        default=8, description="sequences of the fixed batch that eigenvalues are of"
    )


class TraceSettings(EigenvalueSettings):
    """Traces from fresh (probe, microbatch) pairs, and the top eigenvalue on a fixed batch."""

    pairs: Several = Field(default=32, description="(probe, microbatch) pairs of the trace")
    norm_pairs: Several = Field(
        default=16, description="pairs whose probes are restricted to the norms"
    )
    companion_pairs: Several = Field(
        default=16, description="microbatches of the Gauss-Newton and Fisher traces"
    )
    lambda_max: bool = Field(
        default=True, description="the top eigenvalue too, which takes vectors over all weights"
    )
    # A residual of 1e-2 leaves an error of 1e-4 of the value; trained checkpoints took 4 to 13
    # iterations to reach it.
    max_iterations: Several = Field(default=16, description="Lanczos iterations at most")
    tolerance: float = Field(
        default=1e-2, gt=0, description="|Hx - lambda x| / |lambda| that counts as converged"
    )


class PredictionSettings(HessianSettings):
    """Loss increase along the quantization step.

    Only fp32 resolves the difference of the losses before and after it.
    """

    dtype: Literal["fp32"] = "fp32"
    microbatches: Several = Field(default=16, description="microbatches of every figure")


class PlaneSettings(Frozen):
    """Grid of the loss on a plane, and the sequences that every loss is over."""

    grid: int = Field(default=15, ge=3, description="points along either axis: grid x grid losses")
    extent: float = Field(
        default=0.35,
        gt=0,
        description=(
            "reach of the grid beyond its points, in units of the longer direction, or of the"
            " trajectory's longer side"
        ),
    )
    sequences: Several = Field(default=16, description="sequences that every loss is over")
    sequence_length: Count | None = Field(
        default=None, description="tokens; by default the model's context"
    )
    batch_size: Count = Field(
        default=8, description="sequences per forward pass; moves results by rounding only"
    )
    seed: Seed = Field(default=0, description="of the order of the sequences")


class LineSettings(Frozen):
    """Losses along directions by forward passes alone, and the sequences that they are of."""

    sequences: Several = Field(default=16, description="sequences that every loss is over")
    sequence_length: Count | None = Field(
        default=None, description="tokens; by default the model's context"
    )
    batch_size: Count = Field(
        default=1, description="sequences per forward pass; moves results by rounding only"
    )
    seed: Seed = Field(default=0, description="of the order of the sequences")
    dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="of the weights of a pass, rounded once from theta + c d in fp32",
    )
    rise: float = Field(
        default=3e-4,
        gt=0,
        description="nats per token by which the symmetric pair is to raise the loss",
    )
    reach: float = Field(
        default=64.0, gt=0, description="multiple of the direction that the search ends at"
    )


class ProductSettings(HessianSettings):
    """Products with the ranks that share them."""

    level: float = Field(default=0.95, gt=0, le=0.9999)  # coverage of the intervals
    sharding: Literal["none", "fsdp"] = Field(
        default="none", description="ranks share the pairs (none) or the model (fsdp)"
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="kind of the devices")


class HutchinsonSettings(TraceSettings, ProductSettings):
    """All settings of traces and the top eigenvalue."""

    name: Literal["hutchinson"] = "hutchinson"


class LanczosSettings(EigenvalueSettings, ProductSettings):
    """Both ends of the spectrum on the fixed batch, and its density."""

    name: Literal["lanczos"] = "lanczos"
    largest: Count = Field(default=5, description="algebraically largest eigenvalues")
    smallest: int = Field(default=3, ge=0, description="algebraically smallest eigenvalues")
    max_iterations: Several = Field(default=50, description="iterations to the eigenvalues at most")
    tolerance: float = Field(
        default=1e-3, gt=0, description="|Hx - lambda x| / |lambda| that counts as converged"
    )
    starts: Several = Field(default=4, description="start vectors of the density")
    steps: Several = Field(default=30, description="Lanczos steps from each start of the density")

    @model_validator(mode="after")
    def _eigenvalues_have_iterations(self) -> Self:
        count = self.largest + self.smallest
        if count > self.max_iterations:
            raise ValueError(
                f"{count} eigenvalues take as many iterations; give --max-iterations {count} or"
                " ask for fewer"
            )
        return self


class StepSettings(PredictionSettings, ProductSettings):
    """All settings of the loss increase along the quantization step."""


class SliceSettings(PlaneSettings):
    """All settings of the loss on a plane."""

    device: Literal["cpu", "cuda"] = Field(
        default="cpu", exclude=True, description="kind of the devices"
    )


class CriticalSettings(LineSettings):
    """All settings of losses along directions."""

    device: Literal["cpu", "cuda"] = Field(
        default="cpu", exclude=True, description="kind of the devices"
    )


CurvatureSettings = HutchinsonSettings | LanczosSettings


def checked_length(context: int, sequence_length: int | None) -> int:
    """Return the tokens of a sequence, by default the model's context; UserError beyond that."""
    if sequence_length and sequence_length > context:
        raise UserError(
            f"--sequence-length {sequence_length} is beyond the model's context {context};"
            " shorten it"
        )
    return sequence_length or context
