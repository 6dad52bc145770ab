"""A run is one frozen value: what is trained, on what, how long, and when it is measured."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from train.command import UserError, explain_validation

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$"  # of a run and of a study: fit for a directory and a shell


class Frozen(BaseModel):
    """A value that cannot change and knows no other keys than its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    NOT_IDENTITY: ClassVar[frozenset[str]] = frozenset()  # fields that leave the fingerprint as it is


def fingerprint(value: Frozen) -> str:
    """SHA-256 (first 16 hex digits) of the value's canonical JSON, without what is no part of its identity."""
    content = value.model_dump(mode="json", exclude=set(value.NOT_IDENTITY))
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


class ModelConfig(Frozen):
    """An OLMo2 (arXiv 2501.00656), in the terms of transformers' `Olmo2Config`."""

    vocab_size: int = Field(gt=0, description="rows of the embedding, padding included")
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0, description="width of gate and of up, each")
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    rope_theta: float = Field(default=500_000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    initializer_range: float = Field(default=0.02, gt=0, description="std of the normal, truncated at 3 std")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads")
        if self.head_dim % 2:
            raise ValueError(f"head size {self.head_dim} is odd, rotary embeddings need an even one")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"{self.num_attention_heads} heads do not divide into {self.num_key_value_heads} KV heads")
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


class DataConfig(Frozen):
    """Token files made by `python -m train prepare`; relative prefixes start at the run directory."""

    train: str
    held_out: str
    tokenizer: str = Field(description="directory of the tokenizer, copied into every export")
    sequence_length: int = Field(gt=1, description="tokens the model sees at once; also its maximal context")
    held_out_sequences: int = Field(gt=0, description="sequences of the held-out file behind each held-out loss")


class OptimizerConfig(Frozen):
    """AdamW as Ai2 trained OLMo2: norms and lm_head are decayed, the token embedding is not."""

    peak_lr: float = Field(ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip_grad_norm: float = Field(default=1.0, gt=0)
    z_loss: float = Field(default=1e-5, ge=0, description="times mean(logsumexp(logits)^2), added to the loss")


class ConstantPhase(Frozen):
    """The peak learning rate from the end of the warm-up on."""

    kind: Literal["constant"] = "constant"


class CosinePhase(Frozen):
    """Cosine from the peak to `floor` x peak at `horizon_steps`, which may lie far behind the end of the run."""

    kind: Literal["cosine"] = "cosine"
    horizon_steps: int = Field(gt=0)
    floor: float = Field(default=0.1, ge=0, le=1)


class LinearAnneal(Frozen):
    """From the learning rate reached at `start_step` straight to zero at the last step of the run."""

    start_step: int = Field(ge=0)


class ScheduleConfig(Frozen):
    """Learning rate over steps: linear warm-up from zero, a phase, and optionally an anneal to zero.

    A constant phase with an anneal is WSD (arXiv 2404.06395).
    """

    warmup_steps: int = Field(ge=0)
    phase: ConstantPhase | CosinePhase = Field(discriminator="kind")
    anneal: LinearAnneal | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if isinstance(self.phase, CosinePhase) and self.phase.horizon_steps <= self.warmup_steps:
            raise ValueError(f"cosine horizon {self.phase.horizon_steps} ends before the warm-up {self.warmup_steps}")
        if self.anneal and self.anneal.start_step < self.warmup_steps:
            raise ValueError(f"the anneal starts at {self.anneal.start_step}, inside the warm-up {self.warmup_steps}")
        return self


class ParallelConfig(Frozen):
    """Model parallelism; the data-parallel size is the world size divided by both."""

    tensor: int = Field(default=1, gt=0)
    pipeline: int = Field(default=1, gt=0)


class RunConfig(Frozen):
    """One training run. Equality is the fingerprint; the name is for people and says what varies.

    Where it runs is no part of its identity: a run may be resumed at another layout.
    """

    NOT_IDENTITY = frozenset({"name", "parallel", "micro_batch_size"})

    name: str = Field(pattern=NAME_PATTERN)
    seed: int = Field(ge=0, lt=2**63)
    engine: Literal["megatron"] = "megatron"
    precision: Literal["fp32", "bf16"]
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    parallel: ParallelConfig = ParallelConfig()
    total_steps: int = Field(gt=0)
    batch_size: int = Field(gt=0, description="sequences per optimizer step, over all ranks")
    micro_batch_size: int = Field(gt=0, description="sequences per forward pass of one rank")
    save_steps: tuple[int, ...] = Field(description="steps with a permanent checkpoint; the last step is among them")
    evaluate_every_steps: int = Field(gt=0, description="held-out loss at its multiples and at every checkpoint")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if list(self.save_steps) != sorted(set(self.save_steps)) or not self.save_steps:
            raise ValueError("save_steps must rise strictly and not be empty")
        if self.save_steps[0] < 0 or self.save_steps[-1] != self.total_steps:
            raise ValueError(f"save_steps must lie in 0..{self.total_steps} and end with {self.total_steps}")
        if self.schedule.anneal and self.schedule.anneal.start_step >= self.total_steps:
            raise ValueError(
                f"the anneal starts at {self.schedule.anneal.start_step}, after the end {self.total_steps}"
            )
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
            )
        self._check_layout()
        return self

    def _check_layout(self) -> None:
        tensor, pipeline, model = self.parallel.tensor, self.parallel.pipeline, self.model
        if model.num_attention_heads % tensor or model.num_key_value_heads % tensor:
            raise ValueError(
                f"{model.num_attention_heads} heads and {model.num_key_value_heads} KV heads do not divide over "
                f"parallel.tensor {tensor}; choose a common divisor"
            )
        if model.vocab_size % tensor or model.intermediate_size % tensor:
            raise ValueError(
                f"vocab_size {model.vocab_size} and intermediate_size {model.intermediate_size} must be multiples of "
                f"parallel.tensor {tensor}"
            )
        if model.num_hidden_layers % pipeline:
            raise ValueError(
                f"{model.num_hidden_layers} layers do not divide over parallel.pipeline {pipeline}; choose a divisor"
            )

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one optimizer step."""
        return self.batch_size * self.data.sequence_length

    def data_parallel_size(self, world_size: int) -> int:
        """Number of model replicas at this world size; UserError where the batch or the layout does not fit."""
        model_ranks = self.parallel.tensor * self.parallel.pipeline
        if world_size % model_ranks:
            raise UserError(
                f"world size {world_size} is not a multiple of tensor x pipeline = {model_ranks}; "
                f"start torchrun with a multiple of {model_ranks} processes"
            )
        replicas = world_size // model_ranks
        if self.batch_size % (replicas * self.micro_batch_size):
            raise UserError(
                f"batch_size {self.batch_size} is not a multiple of data-parallel size {replicas} x micro_batch_size "
                f"{self.micro_batch_size}; change one of them or the number of processes"
            )
        return replicas


def dump_run(config: RunConfig) -> dict[str, Any]:
    """The content of run.json: the configuration and its fingerprint."""
    return config.model_dump(mode="json") | {"fingerprint": fingerprint(config)}


def load_run(path: Path) -> RunConfig:
    """Reads and validates run.json; UserError for anything unknown, mistyped or edited behind its fingerprint."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a run directory that holds a run.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); correct it") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no JSON object; write one with the keys of a run configuration")
    stated = content.pop("fingerprint", None)
    try:
        config = RunConfig.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise explain_validation(str(path), error) from None
    if stated is not None and stated != fingerprint(config):
        raise UserError(
            f"{path} was edited: fingerprint {stated} stands beside a configuration with {fingerprint(config)}; "
            f"use another run name for another configuration (or remove 'fingerprint' from a run that never started)"
        )
    return config


def with_settings(config: RunConfig, settings: list[str]) -> RunConfig:
    """The configuration with `key.path=value` settings applied and named in its name, for exploring.

    >>> with_settings(config, ["optimizer.peak_lr=6e-4"]).name
    'lr3e-4-peak_lr=6e-4'
    """
    content = config.model_dump(mode="json")
    for setting in settings:
        path, separator, text = setting.partition("=")
        *parents, key = path.split(".")
        owner = content
        for parent in parents:
            owner = owner.get(parent) if isinstance(owner, dict) else None  # type: ignore[assignment]
        if not separator or not isinstance(owner, dict) or key not in owner or path == "name":
            raise UserError(f"--set {setting}: no such key; write key.path=value with a key of run.json")
        try:
            owner[key] = json.loads(text)
        except json.JSONDecodeError:
            owner[key] = text
        content["name"] += re.sub(r"[^A-Za-z0-9._=+-]+", "_", f"-{key}={text}")
    try:
        return RunConfig.model_validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise explain_validation("--set", error) from None
