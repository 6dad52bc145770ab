"""The parts of a run's configuration: model, data, optimizer, schedule, averages, layout, saving."""

from typing import Literal, Self

from pydantic import Field, model_validator

from train.frozen import Frozen


class ModelConfig(Frozen):
    """A causal language model in the terms of transformers' configurations; `family` is its `model_type`."""

    family: Literal["olmo2", "llama", "gpt_neox"] = "olmo2"
    vocab_size: int = Field(gt=0, description="rows of the embedding, padding included")
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0, description="width of the MLP; of gate and of up, each, where it is gated")
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    rope_theta: float = Field(default=500_000.0, gt=0)
    rotary_fraction: float = Field(default=1.0, gt=0, le=1, description="share of a head that rotates; gpt_neox 0.25")
    norm_eps: float = Field(default=1e-6, gt=0, description="of RMSNorm, of LayerNorm for gpt_neox")
    initializer_range: float = Field(default=0.02, gt=0, description="std of every initial matrix")
    initializer: Literal["truncated_normal", "normal"] = Field(
        default="truncated_normal", description="at 3 std, as OLMo2; 'normal' is transformers' own for llama, gpt_neox"
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} heads")
        rotary_size = self.head_dim * self.rotary_fraction
        if rotary_size % 2:
            raise ValueError(f"{rotary_size:g} rotary dimensions of a head, rotary embeddings need an even number")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"{self.num_attention_heads} heads do not divide into {self.num_key_value_heads} KV heads")
        if self.family == "gpt_neox" and self.num_key_value_heads != self.num_attention_heads:
            raise ValueError("gpt_neox has no grouped queries; set num_key_value_heads to num_attention_heads")
        if self.family != "gpt_neox" and self.rotary_fraction != 1:
            raise ValueError(f"{self.family} rotates whole heads; set rotary_fraction to 1")
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


class WeightedSource(Frozen):
    """One part of a blend."""

    source: str = Field(description="prefix of a token file, as in DataConfig.train")
    weight: float = Field(gt=0, description="share of the training sequences, relative to the other sources")


class RepetitionFilter(Frozen):
    """OLMo2's instance filter: a sequence with such a repetition is trained on with zero loss.

    A sequence is dropped if some n-gram of `min_period` to `max_period` tokens stands at least `max_count` times in a
    row in it (allenai/OLMo, olmo/data/util.py, `find_periodic_sequences`).
    """

    min_period: int = Field(default=1, gt=0)
    max_period: int = Field(default=13, gt=0)
    max_count: int = Field(default=32, gt=1)


class DataConfig(Frozen):
    """Token files made or indexed by `python -m train prepare`; relative prefixes start at the run directory."""

    train: str | tuple[WeightedSource, ...]
    held_out: str
    tokenizer: str = Field(description="directory of the tokenizer, copied into every export")
    sequence_length: int = Field(gt=1, description="tokens the model sees at once; also its maximal context")
    held_out_sequences: int = Field(gt=0, description="sequences of the held-out file behind each held-out loss")
    order: Literal["permutation", "olmo", "sequential"] = Field(
        default="permutation",
        description="of the training sequences: a bijection computed on the fly, OLMo's PCG64 shuffle, or as they lie",
    )
    train_range: tuple[int, int] | None = Field(
        default=None, description="sequences [start, stop) of the training file that are trained on; None: all"
    )
    held_out_range: tuple[int, int] | None = Field(
        default=None, description="sequences [start, stop) of the held-out file; None: from its beginning"
    )
    document_masking: bool = Field(default=False, description="attention stays within a document; OLMo2 trains without")
    repetition_filter: RepetitionFilter | None = None

    @model_validator(mode="after")
    def _ranges_fit(self) -> Self:
        for name, bounds in (("train_range", self.train_range), ("held_out_range", self.held_out_range)):
            if bounds and not 0 <= bounds[0] < bounds[1]:
                raise ValueError(f"{name} {list(bounds)} is empty; give [start, stop) with start < stop")
        if isinstance(self.train, tuple):
            if self.train_range or self.order == "olmo":
                raise ValueError("a blend takes neither train_range nor the order 'olmo'; give one training file")
            names = [part.source for part in self.train]
            if not names or len(set(names)) != len(names):
                raise ValueError("a blend needs sources, each once")
        return self

    @property
    def train_sources(self) -> tuple[WeightedSource, ...]:
        """The training files as a blend; a single one has all the weight."""
        return self.train if isinstance(self.train, tuple) else (WeightedSource(source=self.train, weight=1.0),)


class OptimizerConfig(Frozen):
    """AdamW; by default as Ai2 trained OLMo2: norms and lm_head are decayed, the token embedding is not."""

    peak_lr: float = Field(ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    undecayed: tuple[str, ...] = Field(
        default=("embed_tokens",),
        description="parts of HF parameter names that are not decayed; plainLM: ['bias', 'norm']",
    )
    clip_grad_norm: float = Field(default=1.0, gt=0)
    z_loss: float = Field(default=1e-5, ge=0, description="times mean(logsumexp(logits)^2), added to the loss")

    def decays(self, hf_name: str) -> bool:
        """Whether weight decay applies to a parameter, by its HF name."""
        return not any(part in hf_name for part in self.undecayed)


class ConstantPhase(Frozen):
    """The peak learning rate from the end of the warm-up on."""

    kind: Literal["constant"] = "constant"


class CosinePhase(Frozen):
    """Cosine from the peak to `floor` x peak at `horizon_tokens`, which may lie far behind the end of the run."""

    kind: Literal["cosine"] = "cosine"
    horizon_tokens: int = Field(gt=0)
    floor: float = Field(default=0.1, ge=0, le=1)


class LinearPhase(Frozen):
    """Straight from the peak to `floor` x peak at `horizon_tokens`."""

    kind: Literal["linear"] = "linear"
    horizon_tokens: int = Field(gt=0)
    floor: float = Field(default=0.0, ge=0, le=1)


class Anneal(Frozen):
    """From the learning rate reached at `start_step` to `floor` x that rate at the last step of the run.

    With progress t from 0 to 1 the rate falls as 1 - t (linear), (1 + cos(pi t)) / 2 (cosine), or 1 - sqrt(t) (sqrt;
    Haegele et al. 2024, arXiv 2405.18392).
    """

    start_step: int = Field(ge=0)
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    floor: float = Field(default=0.0, ge=0, le=1)


class ScheduleConfig(Frozen):
    """Learning rate over tokens: linear warm-up from zero, a phase, and optionally an anneal, counted in steps.

    A constant phase with an anneal is WSD (arXiv 2404.06395).
    """

    warmup_tokens: int = Field(ge=0)
    phase: ConstantPhase | CosinePhase | LinearPhase = Field(discriminator="kind")
    anneal: Anneal | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not isinstance(self.phase, ConstantPhase) and self.phase.horizon_tokens <= self.warmup_tokens:
            raise ValueError(
                f"the {self.phase.kind} horizon {self.phase.horizon_tokens} ends before the warm-up "
                f"{self.warmup_tokens}"
            )
        return self


class ParallelConfig(Frozen):
    """Model parallelism; the data-parallel size is the world size divided by tensor x pipeline x context."""

    tensor: int = Field(default=1, gt=0)
    pipeline: int = Field(default=1, gt=0)
    virtual_pipeline: int = Field(default=1, gt=0, description="model chunks of one stage; above 1: interleaved 1F1B")
    context: int = Field(default=1, gt=0, description="ranks that share a sequence; needs a GPU")
    sequence: bool = Field(default=False, description="sequence parallelism within tensor-parallel ranks")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError("virtual_pipeline needs pipeline above 1")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence needs tensor above 1")
        return self

    def check_fits(self, model: ModelConfig) -> None:
        """ValueError where a model does not divide over tensor-parallel ranks or pipeline stages."""
        if model.num_attention_heads % self.tensor or model.num_key_value_heads % self.tensor:
            raise ValueError(
                f"{model.num_attention_heads} heads and {model.num_key_value_heads} KV heads do not divide over "
                f"parallel.tensor {self.tensor}; choose a common divisor"
            )
        if model.vocab_size % self.tensor or model.intermediate_size % self.tensor:
            raise ValueError(
                f"vocab_size {model.vocab_size} and intermediate_size {model.intermediate_size} must be multiples of "
                f"parallel.tensor {self.tensor}"
            )
        chunks = self.pipeline * self.virtual_pipeline
        if model.num_hidden_layers % chunks:
            raise ValueError(
                f"{model.num_hidden_layers} layers do not divide over parallel.pipeline {chunks}; choose a divisor"
            )


class ZeroConfig(Frozen):
    """DeepSpeed's ZeRO (arXiv 1910.02054): what is sharded over data-parallel ranks."""

    stage: Literal[0, 1, 2, 3] = 1
    allow_stage_3: bool = Field(default=False, description="stage 3 follows plain training within 5e-3 only")
    overlap_communication: bool = True
    bucket_elements: int = Field(default=500_000_000, gt=0, description="gradients reduced at once")

    @model_validator(mode="after")
    def _stage_3_on_purpose(self) -> Self:
        if self.stage == 3 and not self.allow_stage_3:
            raise ValueError(
                "stage 3 follows plain training within 5e-3 only; set allow_stage_3 to use it all the same"
            )
        return self


class Lawa(Frozen):
    """Latest weight averaging (arXiv 2209.14981): the uniform mean of the last `window` weights, `interval` apart."""

    kind: Literal["lawa"] = "lawa"
    interval_steps: int = Field(gt=0)
    window: int = Field(gt=1)

    @property
    def name(self) -> str:
        """What its checkpoints are called: lawa5x500."""
        return f"lawa{self.window}x{self.interval_steps}"


class Ema(Frozen):
    """Exponential moving average of the weights, updated every `interval_steps` by 1 - `decay`."""

    kind: Literal["ema"] = "ema"
    decay: float = Field(gt=0, lt=1)
    interval_steps: int = Field(default=1, gt=0)

    @property
    def name(self) -> str:
        """What its checkpoints are called: ema0.999x10."""
        return f"ema{self.decay:g}x{self.interval_steps}"


class SpikeConfig(Frozen):
    """A step is a spike if its loss or gradient norm lies `sigmas` standard deviations above the last `window` ones.

    OLMo2-32B skips such steps (OLMo-core, SkipStepOptimizer, 6 sigmas over 128 steps).
    """

    window_steps: int = Field(default=128, gt=1)
    sigmas: float = Field(default=6.0, gt=0)
    action: Literal["stop", "skip"] = "stop"


class SavingConfig(Frozen):
    """How checkpoints are written. Permanent ones are never deleted; restart checkpoints are rotated."""

    asynchronous: bool = False
    restart_every_steps: int | None = Field(default=None, gt=0, description="None: only permanent ones")
    restart_keep: int = Field(default=2, gt=1, description="restart checkpoints kept; the older ones are removed")


class BranchFrom(Frozen):
    """The checkpoint of another run that this one starts from: weights, optimizer state and data position."""

    run: str = Field(description="the other run's directory, relative to this run's")
    step: int = Field(gt=0)
    fingerprint: str = Field(description="of the other run")


class StartFrom(Frozen):
    """The imported checkpoint whose weights a run starts from, instead of drawing them.

    `python -m ckpt_tools import` makes one and prints this. Steps and data begin at 0, with a fresh optimizer.
    """

    checkpoint: str = Field(description="its directory, relative to the run's")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="of its checkpoint.json, which holds those of its files")
