"""What decides the numbers besides the model and the spec."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from train.frozen import Frozen

BLOCK_TOKENS = 2048  # of arXiv:2510.06213 (appendix A)


class CalibrationSettings(Frozen):
    """Which text the Hessians are estimated on."""

    prefix: Path = Field(description="token file")
    sequences: int = Field(ge=1, description="drawn for every seed, none twice")
    sequence_length: int | None = Field(ge=1, description="tokens; None: 2048, or the model's context if less")
    seed: int = Field(ge=0, lt=2**63, description="of the first draw; further draws count on from it")
    seeds: int = Field(default=1, ge=1, description="draws, each quantized and measured")


class EvaluationSettings(Frozen):
    """Which text the losses are measured on, and how its documents are cut."""

    prefix: Path = Field(description="token file")
    max_tokens: int | None = Field(ge=1, description="documents are taken until they hold this many; None: all")
    sequence_length: int | None = Field(ge=2, description="tokens the model sees; None: 2048, or its context if less")
    documents: Literal["separate", "concatenated"] = Field(
        description="separate: none sees another; concatenated: without separator, as arXiv:2510.06213 did"
    )
    bootstrap_samples: int = Field(ge=100)
    level: float = Field(gt=0, lt=1, description="coverage of the intervals")
    seed: int = Field(ge=0, lt=2**63, description="of the bootstrap")


class ComputeSettings(Frozen):
    """How it is computed; moves results by rounding only, but for the dtype."""

    dtype: Literal["fp32", "bf16"] = Field(description="of the full and of the quantized model")
    batch_size: int = Field(ge=1, description="sequences per forward pass")
    device: Literal["cpu", "cuda"]
    scratch: Path | None = Field(description="directory for what would not fit in memory; None: memory")
