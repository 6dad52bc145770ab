"""The configuration of optimizer, schedule, batch-size warm-up, averages and spikes."""

from typing import ClassVar, Literal, Self, assert_never

from pydantic import Field, model_validator

from base.frozen import Frozen

Shape = Literal["linear", "cosine", "sqrt"]  # of a fall of the learning rate


class OptimizerConfig(Frozen):
    """AdamW; by default as Ai2 trained OLMo2: all but the token embedding is decayed.

    A step at the learning rate r multiplies what is decayed, with W = `weight_decay`, by

    - adamw: 1 - r W (Loshchilov and Hutter, arXiv 1711.05101)
    - adamc: 1 - r W r / peak_lr in hidden matrices, elsewhere as adamw (Defazio, arXiv 2506.02285,
      which counts as normalised "every linear layer ... excluding the output layer")
    - independent: 1 - W r / peak_lr, whatever the peak (Wortsman et al., arXiv 2309.14322)
    """

    peak_lr: float = Field(ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    matrices: Literal["adamw", "muon"] = Field(
        default="adamw",
        description=(
            "optimizer of the hidden matrices, in the shapes they have in HF; muon: train/muon.py,"
            " with AdamW for the rest"
        ),
    )
    weight_decay: float = Field(default=0.1, ge=0)
    decay: Literal["adamw", "adamc", "independent"] = Field(
        default="adamw", description="how the learning rate scales the weight decay"
    )
    undecayed: tuple[str, ...] = Field(
        default=("embed_tokens",),
        description="parts of HF parameter names that are not decayed; plainLM: ['bias', 'norm']",
    )
    clip_grad_norm: float = Field(default=1.0, gt=0)
    z_loss: float = Field(
        default=1e-5, ge=0, description="times mean(logsumexp(logits)^2), added to the loss"
    )

    @property
    def uses_muon(self) -> bool:
        """Return whether Muon updates the hidden matrices, and not AdamW as the rest."""
        match self.matrices:
            case "adamw":
                return False
            case "muon":
                return True
            case _:
                assert_never(self.matrices)

    def decays(self, hf_name: str) -> bool:
        """Return whether weight decay applies to a parameter, by its HF name."""
        return not any(part in hf_name for part in self.undecayed)

    def decay_at(self, rate: float, *, hidden: bool) -> float:
        """Return AdamW's weight decay at a learning rate, in a hidden matrix or elsewhere.

        A step multiplies weights by 1 - rate x decay.

        Example:
            >>> optimizer = OptimizerConfig(peak_lr=1e-3, weight_decay=0.1, decay="adamc")
            >>> optimizer.decay_at(5e-4, hidden=True), optimizer.decay_at(5e-4, hidden=False)
            (0.05, 0.1)
        """
        match self.decay:
            case "adamw":
                return self.weight_decay
            case "adamc":
                decay = self.weight_decay
                return decay * rate / self.peak_lr if hidden else decay
            case "independent":
                return self.weight_decay / self.peak_lr
            case _:
                assert_never(self.decay)

    @model_validator(mode="after")
    def _peak_to_divide_by(self) -> Self:
        if self.decay != "adamw" and self.peak_lr == 0:
            raise ValueError(f"decay {self.decay} divides by peak_lr; set a peak_lr above 0")
        return self


class ConstantPhase(Frozen):
    """The peak learning rate from the end of the warm-up on."""

    kind: Literal["constant"] = "constant"


class CosinePhase(Frozen):
    """Cosine from the peak to `floor` x peak at `horizon_tokens`, perhaps after the run's end."""

    kind: Literal["cosine"] = "cosine"
    horizon_tokens: int = Field(gt=0)
    floor: float = Field(default=0.1, ge=0, le=1)


class Anneal(Frozen):
    """A fall from the rate reached at `start_step` to `floor` x that rate at the run's last step.

    With progress t from 0 to 1 the rate falls as 1 - t (linear), (1 + cos(pi t)) / 2 (cosine), or 1
    - sqrt(t) (sqrt; Haegele et al. 2024, arXiv 2405.18392).
    """

    start_step: int = Field(ge=0)
    shape: Shape = "linear"
    floor: float = Field(default=0.0, ge=0, le=1)


class ScheduleConfig(Frozen):
    """Learning rate over tokens: linear warm-up from zero, a phase, perhaps an anneal (in steps).

    A constant phase with an anneal is WSD (arXiv 2404.06395).
    """

    warmup_tokens: int = Field(ge=0)
    phase: ConstantPhase | CosinePhase = Field(discriminator="kind")
    anneal: Anneal | None = None

    @property
    def name(self) -> str:
        """Return the kind of schedule: WSD, constant rate, cosine or cosine with an anneal."""
        match self.phase:
            case ConstantPhase():
                return "WSD" if self.anneal else "constant rate"
            case CosinePhase():
                return "cosine with an anneal" if self.anneal else "cosine"
            case other:
                assert_never(other)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if isinstance(self.phase, CosinePhase) and self.phase.horizon_tokens <= self.warmup_tokens:
            raise ValueError(f"the cosine ends within the warm-up of {self.warmup_tokens} tokens")
        return self


class SmallerBatch(Frozen):
    """A stage of the batch-size warm-up."""

    until_step: int = Field(gt=0, description="the last update of the stage")
    batch_size: int = Field(gt=0, description="sequences per optimizer step, over all ranks")


def sequences_at(step: int, stages: tuple[SmallerBatch, ...], batch_size: int) -> int:
    """Return the sequences of all updates up to `step`: of the stages, then of `batch_size`.

    Example: two steps of 4 and three of 8 sequences.
        >>> sequences_at(5, (SmallerBatch(until_step=2, batch_size=4),), batch_size=8)
        32
    """
    sequences, begin = 0, 0
    for stage in stages:
        end = min(step, stage.until_step)
        sequences += (end - begin) * stage.batch_size
        begin = end
    return sequences + (step - begin) * batch_size


class Lawa(Frozen):
    """Latest weight averaging (arXiv 2209.14981): the mean of `window` weights."""

    kind: Literal["lawa"] = "lawa"
    interval_steps: int = Field(gt=0)
    window: int = Field(gt=1)

    @property
    def slots(self) -> int:
        """Return the copies of the weights that it keeps."""
        return self.window

    @property
    def name(self) -> str:
        """Return the name of its checkpoints: lawa5x500."""
        return f"lawa{self.window}x{self.interval_steps}"


class Ema(Frozen):
    """Exponential moving average of the weights, updated every `interval_steps` by 1 - `decay`."""

    kind: Literal["ema"] = "ema"
    decay: float = Field(gt=0, lt=1)
    interval_steps: int = Field(default=1, gt=0)
    slots: ClassVar[int] = 1  # copies of the weights that it keeps

    @property
    def name(self) -> str:
        """Return the name of its checkpoints: ema0.999x10."""
        return f"ema{self.decay:g}x{self.interval_steps}"


class SpikeConfig(Frozen):
    """Steps whose loss or gradient norm is `sigmas` standard deviations above the steps before.

    OLMo2-32B skips such steps (OLMo-core, SkipStepOptimizer, 6 sigmas over 128 steps). Skipped
    steps count among the steps before: a loss that stays high is soon no spike any more, one that
    keeps rising stops the run.
    """

    window_steps: int = Field(default=128, gt=1, description="steps before, at most")
    sigmas: float = Field(default=6.0, gt=0)
    action: Literal["stop", "skip"] = "stop"
    most_skips: int = Field(default=32, gt=0, description="in a row; one more stops the run")
