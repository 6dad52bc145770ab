"""A run is one frozen value: what is trained, on what, how long, and when it is measured."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from train.command import UserError, explain_validation
from train.frozen import NAME_PATTERN, Frozen, fingerprint
from train.settings import (
    BranchFrom,
    DataConfig,
    Ema,
    Lawa,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SavingConfig,
    ScheduleConfig,
    SpikeConfig,
    StartFrom,
    ZeroConfig,
)


class RunConfig(Frozen):
    """One training run. Equality is the fingerprint; the name is for people and says what varies.

    Where and how it is computed is no part of its identity: a run may be resumed at another layout.
    """

    NOT_IDENTITY = frozenset(
        {"name", "parallel", "zero", "kernels", "recompute", "micro_batch_size", "saving", "norms_every_steps"}
    )

    name: str = Field(pattern=NAME_PATTERN)
    seed: int = Field(ge=0, lt=2**63)
    engine: Literal["megatron", "deepspeed"] = "megatron"
    precision: Literal["fp32", "bf16", "fp8"] = Field(description="fp8: bf16 with matrix products in fp8")
    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    averages: tuple[Annotated[Lawa | Ema, Field(discriminator="kind")], ...] = ()
    spikes: SpikeConfig | None = None
    not_finite: Literal["stop", "skip"] = Field(default="stop", description="at a loss or gradient that overflowed")
    branch_from: BranchFrom | None = None
    start_from: StartFrom | None = None
    parallel: ParallelConfig = ParallelConfig()
    zero: ZeroConfig = Field(default=ZeroConfig(), description="DeepSpeed only")
    kernels: Literal["torch", "transformer_engine"] = Field(default="torch", description="megatron only")
    recompute: Literal["none", "layers"] = Field(default="none", description="layers: activations, layer by layer")
    saving: SavingConfig = SavingConfig()
    total_steps: int = Field(gt=0)
    batch_size: int = Field(gt=0, description="sequences per optimizer step, over all ranks")
    micro_batch_size: int = Field(gt=0, description="sequences per forward pass of one rank")
    save_steps: tuple[int, ...] = Field(description="steps with a permanent checkpoint; the last step is among them")
    evaluate_every_steps: int = Field(gt=0, description="held-out loss at its multiples and at every checkpoint")
    norms_every_steps: int | None = Field(default=None, gt=0, description="log norms of weights and updates per group")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if list(self.save_steps) != sorted(set(self.save_steps)) or not self.save_steps:
            raise ValueError("save_steps must rise strictly and not be empty")
        if self.save_steps[0] < 0 or self.save_steps[-1] != self.total_steps:
            raise ValueError(f"save_steps must lie in 0..{self.total_steps} and end with {self.total_steps}")
        self._check_schedule()
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}"
            )
        names = [average.name for average in self.averages]
        if len(set(names)) != len(names):
            raise ValueError(f"an average is listed twice among {', '.join(names)}")
        self._check_engine()
        self._check_layout()
        return self

    def _check_schedule(self) -> None:
        anneal = self.schedule.anneal
        if anneal and anneal.start_step >= self.total_steps:
            raise ValueError(f"the anneal starts at {anneal.start_step}, after the end {self.total_steps}")
        if anneal and anneal.start_step * self.tokens_per_step < self.schedule.warmup_tokens:
            raise ValueError(f"the anneal starts at step {anneal.start_step}, inside the warm-up")
        if self.branch_from and self.start_from:
            raise ValueError("branch_from and start_from are two beginnings; remove one")
        if self.branch_from and self.branch_from.step >= self.total_steps:
            raise ValueError(f"the branch starts at {self.branch_from.step}, after the end {self.total_steps}")
        if self.branch_from and self.save_steps[0] <= self.branch_from.step:
            raise ValueError(f"save_steps must lie behind step {self.branch_from.step}, where the branch starts")

    def _check_engine(self) -> None:
        if self.engine == "megatron":
            if self.model.family != "olmo2":
                raise ValueError(f"the megatron engine trains olmo2, not {self.model.family}; set engine to deepspeed")
            if self.zero != ZeroConfig():
                raise ValueError("zero belongs to the deepspeed engine; remove it or set engine to deepspeed")
            if self.precision == "fp8" and self.kernels != "transformer_engine":
                raise ValueError("fp8 needs kernels 'transformer_engine'")
            return
        if self.parallel != ParallelConfig() or self.kernels != "torch" or self.precision == "fp8":
            raise ValueError("parallel, kernels and fp8 belong to the megatron engine; deepspeed trains data-parallel")
        if self.zero.stage == 0 and self.precision == "bf16":
            raise ValueError("bf16 with ZeRO stage 0 takes a phantom Adam step at its start; set zero.stage to 1 or 2")
        unbucketed = self.zero.stage == 0 or (self.zero.stage == 1 and self.precision == "bf16")
        buckets = ZeroConfig().model_copy(update={"stage": self.zero.stage, "allow_stage_3": self.zero.allow_stage_3})
        if unbucketed and self.zero != buckets:
            raise ValueError(
                f"ZeRO stage {self.zero.stage} in {self.precision} reduces after the backward pass, without buckets or "
                f"overlap; leave overlap_communication and bucket_elements out, or set zero.stage to 2"
            )
        if self.zero.stage == 3 and self.averages:
            raise ValueError("averages are kept at ZeRO stages 0 to 2; lower zero.stage or remove averages")

    def _check_layout(self) -> None:
        self.parallel.check_fits(self.model)
        tensor = self.parallel.tensor
        if self.parallel.sequence and self.data.sequence_length % tensor:
            raise ValueError(
                f"sequence_length {self.data.sequence_length} does not divide over parallel.tensor {tensor}"
            )
        if self.parallel.context > 1 and self.data.sequence_length % (2 * self.parallel.context):
            raise ValueError(
                f"sequence_length {self.data.sequence_length} is not a multiple of 2 x parallel.context "
                f"{self.parallel.context}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one optimizer step."""
        return self.batch_size * self.data.sequence_length

    @property
    def warmup_steps(self) -> int:
        """Updates until the learning rate has reached its peak."""
        return -(-self.schedule.warmup_tokens // self.tokens_per_step)

    def data_parallel_size(self, world_size: int) -> int:
        """Number of model replicas at this world size; UserError where the batch or the layout does not fit."""
        parallel = self.parallel
        model_ranks = parallel.tensor * parallel.pipeline * parallel.context
        if world_size % model_ranks:
            raise UserError(
                f"world size {world_size} is not a multiple of tensor x pipeline x context = {model_ranks}; "
                f"start torchrun with a multiple of {model_ranks} processes"
            )
        replicas = world_size // model_ranks
        if self.batch_size % (replicas * self.micro_batch_size):
            raise UserError(
                f"batch_size {self.batch_size} is not a multiple of data-parallel size {replicas} x micro_batch_size "
                f"{self.micro_batch_size}; change one of them or the number of processes"
            )
        if parallel.virtual_pipeline > 1 and self.batch_size // (replicas * self.micro_batch_size) % parallel.pipeline:
            raise UserError(
                f"interleaved pipelining needs a multiple of parallel.pipeline {parallel.pipeline} microbatches, not "
                f"{self.batch_size // (replicas * self.micro_batch_size)}; change batch_size or micro_batch_size"
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
