"""The configuration of parallelism."""

from typing import Literal, Self

from pydantic import Field, model_validator

from base.frozen import Frozen
from train.model.config import ModelConfig


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

    def check_fits(self, model: ModelConfig) -> None:
        """Raise ValueError unless a model divides over tensor ranks and pipeline stages."""
        if model.num_attention_heads % self.tensor or model.num_key_value_heads % self.tensor:
            raise ValueError(
                f"{model.num_attention_heads} heads and {model.num_key_value_heads} KV heads do not"
                f" divide over parallel.tensor {self.tensor}; choose a common divisor"
            )
        if model.vocab_size % self.tensor or model.intermediate_size % self.tensor:
            raise ValueError(
                f"vocab_size {model.vocab_size} and intermediate_size {model.intermediate_size}"
                f" must be multiples of parallel.tensor {self.tensor}"
            )
        if model.num_hidden_layers % self.pipeline:
            raise ValueError(
                f"{model.num_hidden_layers} layers do not divide over parallel.pipeline"
                f" {self.pipeline}; choose a divisor"
            )


class ZeroConfig(Frozen):
    """DeepSpeed's ZeRO (arXiv 1910.02054): 1 shards optimizer state over ranks, 2 gradients too."""

    stage: Literal[1, 2] = 1
