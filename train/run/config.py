"""The configuration of a run, one frozen value: run.json.

Its parts are in `train.run.optimization`, `train.run.parallel`, `train.run.saving`,
`train.data.config` and `train.model.config`; a field that varies with time is a function of the
step in `train.run.schedules`.
"""

import bisect
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from base.errors import UserError
from base.frozen import NAME_PATTERN, Frozen, fingerprint
from base.names import dotted_keys
from base.reading import as_model, read_object
from base.settings import change, check_path, name_with
from train.data.config import DataConfig
from train.model.config import ModelConfig
from train.model.families import TRAINED
from train.model.parametrization import Scaling, completep
from train.model.precision import FP8_RECIPES, Precision
from train.optimizers import AnyOptimizer
from train.optimizers.settings import MatrixOptimizer
from train.run.optimization import Ema, Lawa, ScheduleConfig, SmallerBatch, SpikeConfig
from train.run.parallel import ParallelConfig, ZeroConfig
from train.run.perturbation import Perturbation, Sam
from train.run.probe import ProbeConfig
from train.run.saving import SavingConfig


class BranchFrom(Frozen):
    """The checkpoint of another run that this one continues: weights, state, data position."""

    run: str = Field(description="the other run's directory, relative to this run's")
    step: int = Field(gt=0)
    fingerprint: str = Field(description="of the other run")


class StartFrom(Frozen):
    """An imported checkpoint whose weights a run starts from, instead of drawing them.

    `python -m ckpt_tools import` makes one and prints this. Steps and data begin at 0, with a fresh
    optimizer.
    """

    checkpoint: str = Field(description="its directory, relative to the run's")
    sha256: str = Field(
        pattern=r"^[0-9a-f]{64}$",
        description="of its checkpoint.json, which holds those of its files",
    )


class RunConfig(Frozen):
    """One training run. Equality is the fingerprint; the name is for people and says what varies.

    Where and how it is computed is not part of its identity: another layout may resume a run.
    """

    # None of these changes an update, but for rounding: a run may resume with others.
    NOT_IDENTITY = frozenset(
        {"name", "parallel", "zero", "kernels", "recompute", "cuda_graphs", "micro_batch_size"}
        | {"saving", "observe_every_steps", "probe", "factors"}
    )

    name: str = Field(pattern=NAME_PATTERN)
    factors: dict[str, int | float | str] = Field(default={}, description="what a sweep varied")
    seed: int = Field(ge=0, lt=2**63)
    engine: Literal["megatron", "deepspeed"] = "megatron"
    precision: Precision = Field(
        description="the last three: bf16 with matrix products of 8-bit numbers, megatron only;"
        " fp8 has one scale for a tensor, fp8_blockwise for 128 numbers, mxfp8 for 32"
    )
    model: ModelConfig
    data: DataConfig
    optimizer: AnyOptimizer
    parametrization: Literal["standard", "completep"] = Field(
        default="standard",
        description="completep (arXiv 2505.01618): initializer_range, rates, decay and epsilon are"
        " those of a model of base_width and base_depth, from which follow this one's",
    )
    base_width: int = Field(default=256, gt=0, description="hidden_size; completep only")
    base_depth: int = Field(default=4, gt=0, description="num_hidden_layers; completep only")
    schedule: ScheduleConfig
    averages: tuple[Annotated[Lawa | Ema, Field(discriminator="kind")], ...] = ()
    perturbation: Perturbation | None = Field(
        default=None,
        description="of the weights that forward and backward see; the update is of the exact ones",
    )
    spikes: SpikeConfig | None = None
    branch_from: BranchFrom | None = None
    start_from: StartFrom | None = None
    parallel: ParallelConfig = ParallelConfig()
    zero: ZeroConfig = Field(default=ZeroConfig(), description="DeepSpeed only")
    kernels: Literal["torch", "transformer_engine"] = Field(
        default="torch", description="megatron only"
    )
    recompute: Literal["none", "selective", "layers"] = Field(
        default="none",
        description="selective: norms, rotary embedding and SwiGLU, megatron only; layers:"
        " activations, layer by layer",
    )
    cuda_graphs: bool = Field(
        default=False,
        description="replay one CUDA graph for all microbatches of a step but the first and the"
        " last, which takes the memory of a microbatch once more; megatron on GPUs only",
    )
    saving: SavingConfig = SavingConfig()
    total_steps: int = Field(gt=0)
    batch_size: int = Field(gt=0, description="sequences per optimizer step, over all ranks")
    batch_warmup: tuple[SmallerBatch, ...] = Field(
        default=(), description="smaller batches of the first steps, in the order of training"
    )
    micro_batch_size: int = Field(
        gt=0,
        description="sequences per forward pass of one rank; on GPUs a study takes fewer where more"
        " do not fit or take longer",
    )
    save_steps: tuple[int, ...] = Field(
        description="steps with a permanent checkpoint; the last step is among them"
    )
    evaluate_every_steps: int = Field(
        gt=0, description="held-out loss at its multiples and at every checkpoint"
    )
    observe_every_steps: int | None = Field(
        default=None,
        gt=0,
        description="norms of weights, gradients, updates and residual stream, and the largest"
        " attention logit, of every layer, and outlier statistics of every linear, at its"
        " multiples",
    )
    probe: ProbeConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if list(self.save_steps) != sorted(set(self.save_steps)) or not self.save_steps:
            raise ValueError("save_steps must rise strictly and not be empty")
        # The last weights are the result of a run: they have to be a checkpoint.
        if self.save_steps[0] < 0 or self.save_steps[-1] != self.total_steps:
            raise ValueError(
                f"save_steps must be in 0..{self.total_steps} and end with {self.total_steps}"
            )
        for name in ("full_steps", "average_steps"):
            others = set(getattr(self.saving, name) or ()) - set(self.save_steps)
            if others:
                raise ValueError(f"saving.{name} has {min(others)}, which save_steps lacks; add it")

        self._check_schedule()
        self._check_parametrization()
        self._check_perturbation()
        for size in self.batch_sizes:
            if size % self.micro_batch_size:
                raise ValueError(
                    f"batch_size {size} is not a multiple of micro_batch_size"
                    f" {self.micro_batch_size}"
                )
        stages = [stage.until_step for stage in self.batch_warmup]
        if stages != sorted(set(stages)):
            raise ValueError(f"the stages of batch_warmup end at {stages}; let the steps rise")
        # Slots and checkpoints of an average go by its name.
        names = [average.name for average in self.averages]
        if len(set(names)) != len(names):
            raise ValueError(f"an average is listed twice among {', '.join(names)}")

        self._check_engine()
        self._check_graphs()
        self._check_layout()
        if self.probe:
            self.probe.check(self.model, self.data, self.parallel, self.precision)
        return self

    def _check_schedule(self) -> None:
        anneal = self.schedule.anneal
        if anneal and anneal.start_step >= self.total_steps:
            raise ValueError(
                f"the anneal starts at {anneal.start_step}, after the end {self.total_steps}"
            )
        if anneal and self.tokens_at(anneal.start_step) < self.schedule.warmup_tokens:
            raise ValueError(f"the anneal starts at step {anneal.start_step}, inside the warm-up")
        if self.branch_from and self.start_from:
            raise ValueError("branch_from and start_from are two beginnings; remove one")
        # A branch makes no step up to there: its parent has those checkpoints.
        if self.branch_from and self.save_steps[0] <= self.branch_from.step:
            raise ValueError(
                f"save_steps must be greater than the branch's {self.branch_from.step}"
            )

    def _check_parametrization(self) -> None:
        for name in ("base_width", "base_depth"):
            is_set = getattr(self, name) != type(self).model_fields[name].default
            if is_set and self.parametrization == "standard":
                raise ValueError(f"{name} belongs to completep; set parametrization to completep")
        if self.optimizer.RATE_BY_WIDTH is None and self.parametrization == "completep":
            raise ValueError(
                f"no rule of completep is known for the rate of {self.optimizer.matrices}; set"
                " parametrization to standard, or optimizer.matrices to another"
            )
        model = self.model
        is_bare = model.row.norm == "bare" and model.tie_word_embeddings
        if is_bare and self.parametrization == "completep":
            raise ValueError(
                "completep scales what a tied head reads by the final norm's weight, and"
                f" {model.family} has none; set model.tie_word_embeddings to false"
            )

    def _check_perturbation(self) -> None:
        perturbation = self.perturbation
        if not perturbation:
            return
        if self.precision in FP8_RECIPES:
            raise ValueError(
                f"perturbation changes weights that {self.precision} would round again; set"
                " precision to 'bf16' or remove perturbation"
            )
        if perturbation.from_step is None and not self.schedule.anneal:
            raise ValueError(
                "perturbation begins with the anneal, and there is none; set perturbation.from_step"
            )
        if perturbation.from_step and perturbation.from_step > self.total_steps:
            raise ValueError(
                f"perturbation.from_step {perturbation.from_step} is after the last step"
                f" {self.total_steps}; lower it"
            )
        begin = self.branch_from.step if self.branch_from else 0
        if not self.perturbed_steps(begin, self.total_steps):
            raise ValueError(
                f"perturbation changes no update up to the last step {self.total_steps}; lower"
                " perturbation.every_steps"
            )
        perturbation.check(self.model)
        self._check_ascents()

    def _check_ascents(self) -> None:
        if isinstance(self.perturbation, Sam) and self.perturbation.every_steps > 1 and self.spikes:
            raise ValueError(
                "spikes compares gradient norms of ascended weights with those of other updates;"
                " set perturbation.every_steps to 1 or spikes to null"
            )
        sequences = self.ascent_sequences
        for size in self.batch_sizes:
            if sequences and size % sequences:
                raise ValueError(
                    f"batch_size {size} is not a multiple of perturbation.sequences {sequences};"
                    " change one of them"
                )

    @property
    def ascent_sequences(self) -> int | None:
        """Return the sequences that share an ascent step, where that is not all of a batch."""
        return self.perturbation.sequences if isinstance(self.perturbation, Sam) else None

    def perturbed_at(self, step: int) -> bool:
        """Return whether update `step` computes with changed weights."""
        return self.perturbed_steps(step - 1, step) == 1

    def perturbed_steps(self, after: int, until: int) -> int:
        """Return how many of the updates after `after`, up to `until`, have changed weights."""
        if self.perturbation is None:
            return 0
        return self.perturbation.active_steps(after, until, self._anneal_start)

    @property
    def perturbed_from(self) -> int | None:
        """Return the first update of this run, or branch, that its perturbation may change."""
        first = self.perturbation.first_step(self._anneal_start) if self.perturbation else None
        if first is None or self.branch_from is None:
            return first
        return max(first, self.branch_from.step + 1)

    @property
    def _anneal_start(self) -> int | None:
        return self.schedule.anneal.start_step if self.schedule.anneal else None

    def _check_engine(self) -> None:
        if self.engine == "megatron":
            if self.model.training.megatron is None:
                trained = ", ".join(name for name, row in TRAINED.items() if row.megatron)
                raise ValueError(
                    f"the megatron engine trains {trained}, not {self.model.family}; set engine to"
                    " deepspeed"
                )
            if self.zero != ZeroConfig():
                raise ValueError("zero belongs to the deepspeed engine; set engine to deepspeed")
            if self.precision in FP8_RECIPES and self.kernels != "transformer_engine":
                raise ValueError(f"{self.precision} needs kernels 'transformer_engine'")
            return
        if self.zero.stage == 3 and isinstance(self.optimizer, MatrixOptimizer):
            raise ValueError(
                f"{self.optimizer.matrices} updates whole matrices, which zero.stage 3 cuts; set"
                " zero.stage to 2"
            )
        if self.recompute == "selective":
            raise ValueError("recompute 'selective' belongs to the megatron engine; set 'layers'")
        of_megatron = {
            "parallel": self.parallel != ParallelConfig(),
            "kernels": self.kernels != "torch",
            f"precision '{self.precision}'": self.precision in FP8_RECIPES,
        }
        for name, is_set in of_megatron.items():
            if is_set:
                raise ValueError(f"{name} belongs to the megatron engine; set engine to megatron")

    def _check_graphs(self) -> None:
        """Raise ValueError where a graph of a microbatch would not be right."""
        other = {
            "engine 'deepspeed'": self.engine == "deepspeed",
            "kernels 'transformer_engine'": self.kernels == "transformer_engine",
            "parallel.tensor or parallel.pipeline": self.parallel != ParallelConfig(),
            # Documents are of another number and length in every microbatch.
            "data.document_mask": self.data.document_mask,
            # Their steps have another number of microbatches, for which a graph is recorded anew.
            "perturbation.sequences": bool(self.ascent_sequences),
        }
        for name, is_set in other.items():
            if self.cuda_graphs and is_set:
                raise ValueError(f"cuda_graphs does not go with {name}; set cuda_graphs to false")

    def _check_layout(self) -> None:
        model, parallel = self.model, self.parallel
        tensor: dict[str, int] = {
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "vocab_size": model.vocab_size,
            "intermediate_size": model.intermediate_size,
        }
        # Sequence parallelism cuts the tokens over the tensor ranks.
        if parallel.sequence:
            tensor["sequence_length"] = self.data.sequence_length
        for sizes, name, parts in (
            (tensor, "tensor", parallel.tensor),
            ({"num_hidden_layers": model.num_hidden_layers}, "pipeline", parallel.pipeline),
        ):
            for key, size in sizes.items():
                if size % parts:
                    raise ValueError(f"{key} {size} does not divide over parallel.{name} {parts}")

    def scaling_of(self, name: str) -> Scaling:
        """Return what scales initial value, rate and epsilon of a parameter, by its HF name."""
        if self.parametrization == "standard":
            return Scaling()
        assert self.optimizer.RATE_BY_WIDTH is not None
        return completep(
            name,
            self.model,
            base_width=self.base_width,
            base_depth=self.base_depth,
            rate_by_width=self.optimizer.RATE_BY_WIDTH,
        )

    @property
    def found_at(self) -> str:
        """Return the size that the optimizer's settings are for, in words; empty for its own."""
        if self.parametrization == "standard":
            return ""
        return f" at width {self.base_width} and depth {self.base_depth} ({self.parametrization})"

    @property
    def tokens_per_step(self) -> int:
        """Return the training tokens of one optimizer step, after the batch-size warm-up."""
        return self.batch_size * self.data.sequence_length

    @property
    def batch_sizes(self) -> list[int]:
        """Return the sequences of a step, of every stage of the warm-up and after it."""
        return [*(stage.batch_size for stage in self.batch_warmup), self.batch_size]

    def batch_size_at(self, step: int) -> int:
        """Return the sequences of update `step`, over all ranks."""
        return self.sequences_at(step) - self.sequences_at(step - 1)

    def sequences_at(self, step: int) -> int:
        """Return the sequences of all updates up to `step`: where the next one's data begin."""
        sequences, begin = 0, 0
        for stage in self.batch_warmup:
            # A stage that ends after `step` stops there, and the later ones add nothing.
            end = min(step, stage.until_step)
            sequences += (end - begin) * stage.batch_size
            begin = end
        return sequences + (step - begin) * self.batch_size

    def tokens_at(self, step: int) -> int:
        """Return the training tokens of all updates up to `step`."""
        return self.sequences_at(step) * self.data.sequence_length

    def perturbed_tokens(self, after: int, until: int) -> int:
        """Return the training tokens of the updates that `perturbed_steps` counts."""
        sequences = 0
        for stage in self.batch_warmup:
            end = min(until, max(after, stage.until_step))
            sequences += self.perturbed_steps(after, end) * stage.batch_size
            after = end
        sequences += self.perturbed_steps(after, until) * self.batch_size
        return sequences * self.data.sequence_length

    def passed_tokens(self, after: int, until: int) -> int:
        """Return the tokens that the updates after `after`, up to `until`, compute: of all passes.

        SAM passes twice over the tokens of a perturbed update.
        """
        tokens = self.tokens_at(until) - self.tokens_at(after)
        if self.perturbation is None:
            return tokens
        return tokens + (self.perturbation.PASSES - 1) * self.perturbed_tokens(after, until)

    @property
    def total_tokens(self) -> int:
        """Return the training tokens of the run, those before a branch included."""
        return self.tokens_at(self.total_steps)

    @property
    def warmup_steps(self) -> int:
        """Return the updates until the learning rate has reached its peak."""
        peak = self.schedule.warmup_tokens
        # A step has at least one token, so the peak is reached within `peak` steps.
        return bisect.bisect_left(range(peak), peak, key=self.tokens_at)

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of model replicas; UserError where batch or layout do not fit."""
        parallel = self.parallel
        model_ranks = parallel.tensor * parallel.pipeline
        if world_size % model_ranks:
            raise UserError(
                f"world size {world_size} is not a multiple of tensor x pipeline ="
                f" {model_ranks}; start torchrun with a multiple of {model_ranks} processes"
            )
        replicas = world_size // model_ranks
        for size in self.batch_sizes:
            if size % (replicas * self.micro_batch_size) == 0:
                continue
            raise UserError(
                f"batch_size {size} is not a multiple of data-parallel size {replicas} x"
                f" micro_batch_size {self.micro_batch_size}; change one of them"
            )
        sequences = self.ascent_sequences
        if sequences and sequences % (replicas * self.micro_batch_size):
            raise UserError(
                f"perturbation.sequences {sequences} is not a multiple of data-parallel size"
                f" {replicas} x micro_batch_size {self.micro_batch_size}; change one of them"
            )
        number = self.batch_size // (replicas * self.micro_batch_size)
        if self.cuda_graphs and number < 3:
            raise UserError(
                "cuda_graphs replays all but the first and the last microbatch of a step, and there"
                f" are {number}; set micro_batch_size lower, or cuda_graphs to false"
            )
        return replicas


def dump_run(config: RunConfig) -> dict[str, Any]:
    """Return the content of run.json: the configuration and its fingerprint."""
    return config.model_dump(mode="json") | {"fingerprint": fingerprint(config)}


def load_run(path: Path) -> RunConfig:
    """Read run.json; UserError for what is unknown, mistyped or does not fit its fingerprint."""
    try:
        content = read_object(path, "correct it")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give a run directory with a run.json") from None
    stated = content.pop("fingerprint", None)
    config = as_model(RunConfig, content, path)
    # The first start writes the fingerprint: without one the file may still be edited.
    if stated is not None and stated != fingerprint(config):
        raise UserError(
            f"{path} was edited: it states fingerprint {stated}, not {fingerprint(config)}; use"
            " another run name, or remove 'fingerprint' from a run that never started"
        )
    return config


def settable_paths(config: RunConfig) -> list[str]:
    """Return the paths that `--set` can change: all but the name and what a sweep varied."""
    return list(dotted_keys(config.model_dump(mode="json", exclude={"name", "factors"})))


def with_settings(config: RunConfig, settings: list[str]) -> RunConfig:
    """Return the configuration changed by PATH=VALUE settings, which its name says.

    With optimizer.peak_lr=6e-4 the name lr3e-4 becomes lr3e-4-peak_lr=6e-4.
    """
    content, paths = config.model_dump(mode="json"), settable_paths(config)
    named = []
    for setting in settings:
        check_path(setting, paths)
        change(content, setting)
        path, _, value = setting.partition("=")
        named.append((path.rpartition(".")[2], value))
    content["name"] = name_with(config.name, named)
    return as_model(RunConfig, content, "--set")
