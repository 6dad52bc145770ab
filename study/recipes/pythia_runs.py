"""The runs behind the recipes of Pythia: what arXiv 2510.06213 trained on FineWeb-Edu, and the same in small."""

from dataclasses import dataclass
from typing import Literal

from study.recipes.parts import (
    EVAL_TOKENS,
    SMALL_CURVATURE,
    SMALL_QUANTIZATION,
    SMALL_TEXT,
    WEB_METHODS,
    WEB_SPECS,
    amount_name,
    annealed,
    data_of,
    web_text,
)
from study.settings import CurvatureSettings, QuantizationSettings
from study.text import PreparedText, StandardLibrary, TokenFile
from train.config import RunConfig
from train.models import PYTHIA_70M, PYTHIA_160M, pythia
from train.settings import (
    Anneal,
    ConstantPhase,
    CosinePhase,
    Lawa,
    ModelConfig,
    OptimizerConfig,
    SavingConfig,
    ScheduleConfig,
)

PEAK = 3e-3  # where no other is stated
COOLDOWN = 10  # of a budget, one part is the cooldown
COSINE_FLOOR = 0.1  # as the released Pythia's; the paper states none


@dataclass(frozen=True)
class Size:
    """What differs between the profiles; steps are optimizer steps.

    Attributes:
        total_steps: of a full run.
        budgets: ends of the cooldowns of one stable run; the last is `total_steps`.
        doublings: budgets of the replication of arXiv 2411.04330; the last is `total_steps`.
        peaks: of the sweep of learning rates.
        two_peaks: at which cosine and WSD are compared.
        decays: of the sweep of weight decays.
        save_every: steps between the checkpoints of a stable phase.
        cooldown_saves: checkpoints of a cooldown.
        interval: steps between evaluations, and between the weights that LAWA averages.
    """

    models: dict[str, ModelConfig]
    total_steps: int
    warmup_steps: int
    budgets: tuple[int, ...]
    doublings: tuple[int, ...]
    peaks: tuple[float, ...]
    two_peaks: tuple[float, ...]
    decays: tuple[float, ...]
    save_every: int
    cooldown_saves: int
    interval: int
    batch_size: int
    micro_batch_size: int
    sequence_length: int
    held_out_sequences: int
    precision: Literal["fp32", "bf16"]
    ranks: int
    text: StandardLibrary | PreparedText
    quantization: QuantizationSettings
    curvature: CurvatureSettings
    saving: SavingConfig

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one optimizer step."""
        return self.batch_size * self.sequence_length

    def cooldown_steps(self, end: int) -> tuple[int, ...]:
        """Checkpoints of a cooldown that ends at `end`, the first half an interval behind its start.

        At 190,000 they are 2,000 apart: the paper's landscape is spanned by 188,000 and 190,000 (landscape.py).
        """
        every = 2 * (end // COOLDOWN) // (2 * self.cooldown_saves - 1)
        return tuple(range(end - (self.cooldown_saves - 1) * every, end + 1, every))

    def stable_steps(self, end: int) -> tuple[int, ...]:
        """Checkpoints of a stable phase, the last at its `end`."""
        return tuple(sorted({*range(self.save_every, end, self.save_every), end}))


# 524,288 tokens a step, 99.6e9 tokens in all, warm-up 1%, cooldown 10% (the paper's "1900 steps" is a slip for 19,000).
# The values of `doublings`, `two_peaks` and `decays` are this project's choice: the paper's are not published.
# On 8 H100 with 80 GB, 'python -m train plan' has a rank at 40 GB with 160M parameters and at 31 GB with 70M.
FULL = Size(
    models={"70m": PYTHIA_70M, "160m": PYTHIA_160M},
    total_steps=190_000,
    warmup_steps=1_900,
    budgets=(20_000, 54_000, 88_000, 122_000, 156_000, 190_000),
    doublings=(23_750, 47_500, 95_000, 190_000),
    peaks=(3e-4, 1e-3, 3e-3, 1e-2),
    two_peaks=(1e-3, 3e-3),
    decays=(0.01, 0.03, 0.1, 0.3, 1.0),
    save_every=10_000,
    cooldown_saves=10,
    interval=500,
    batch_size=256,
    micro_batch_size=16,
    sequence_length=2048,
    held_out_sequences=256,
    precision="bf16",
    ranks=8,
    text=web_text(
        "EleutherAI/gpt-neox-20b",
        TokenFile(name="fineweb-edu-100bt", dataset="HuggingFaceFW/fineweb-edu", config="sample-100BT"),
    ),
    quantization=QuantizationSettings(
        specs=WEB_SPECS,
        methods=WEB_METHODS,
        by_block=WEB_SPECS,
        calibration_sequences=256,
        eval_tokens=EVAL_TOKENS,
        block_tokens=EVAL_TOKENS // 4,
    ),
    curvature=CurvatureSettings(  # the paper: 100 sequences of 2,048 tokens, of FineWeb-Edu
        pairs=100,
        norm_pairs=16,
        companion_pairs=32,
        microbatch_sequences=1,
        fixed_sequences=32,
        tolerance=1e-2,
        step_microbatches=32,
        slice_grid=31,
        slice_sequences=32,
    ),
    saving=SavingConfig(asynchronous=True, restart_every_steps=2_000),
)
SMALL = Size(
    models=dict.fromkeys(
        ("70m", "160m"),
        pythia(hidden_size=64, layers=2, heads=4).model_copy(update={"vocab_size": SMALL_TEXT.vocab_size}),
    ),
    total_steps=80,
    warmup_steps=4,
    budgets=(40, 80),
    doublings=(40, 80),
    peaks=(3e-3, 1e-2),
    two_peaks=(3e-3, 1e-2),
    decays=(0.1, 1.0),
    save_every=40,
    cooldown_saves=2,
    interval=4,
    batch_size=16,
    micro_batch_size=8,
    sequence_length=128,
    held_out_sequences=16,
    precision="fp32",
    ranks=2,
    text=SMALL_TEXT,
    quantization=SMALL_QUANTIZATION,
    curvature=SMALL_CURVATURE,
    saving=SavingConfig(),
)


def _run(
    size: Size,
    name: str,
    *,
    phase: ConstantPhase | CosinePhase,
    save_steps: tuple[int, ...],
    model: str = "160m",
    peak_lr: float = PEAK,
    weight_decay: float = 0.1,
    anneal: Anneal | None = None,
    averages: tuple[Lawa, ...] = (),
) -> RunConfig:
    """A run as plainLM trains: no decay of biases and norms, no z-loss, data in order, its sample's seed 100."""
    return RunConfig(
        name=name,
        seed=100,
        engine="deepspeed",
        precision=size.precision,
        model=size.models[model],
        data=data_of(
            size.text,
            sequence_length=size.sequence_length,
            held_out_sequences=size.held_out_sequences,
            order="sequential",
        ),
        optimizer=OptimizerConfig(peak_lr=peak_lr, weight_decay=weight_decay, undecayed=("bias", "norm"), z_loss=0.0),
        schedule=ScheduleConfig(warmup_tokens=size.warmup_steps * size.tokens_per_step, phase=phase, anneal=anneal),
        averages=averages,
        saving=size.saving,
        total_steps=save_steps[-1],
        batch_size=size.batch_size,
        micro_batch_size=size.micro_batch_size,
        save_steps=save_steps,
        evaluate_every_steps=size.interval,
    )


def wsd(size: Size, name: str, peak_lr: float = PEAK, weight_decay: float = 0.1) -> RunConfig:
    """Warm-up, the peak, and a linear cooldown to zero over the last tenth, in one run."""
    end = size.total_steps
    start = end - end // COOLDOWN
    saves = (*size.stable_steps(start), *size.cooldown_steps(end))
    anneal = Anneal(start_step=start)
    return _run(
        size,
        name,
        phase=ConstantPhase(),
        save_steps=saves,
        peak_lr=peak_lr,
        weight_decay=weight_decay,
        anneal=anneal,
    )


def cosine(size: Size, name: str, end: int, *, model: str = "160m", peak_lr: float = PEAK) -> RunConfig:
    """Warm-up, and a cosine to a tenth of the peak, with as many checkpoints in its last tenth as a cooldown has."""
    phase = CosinePhase(horizon_tokens=end * size.tokens_per_step, floor=COSINE_FLOOR)
    saves = (*size.stable_steps(end - end // COOLDOWN), *size.cooldown_steps(end))
    return _run(size, name, phase=phase, save_steps=saves, model=model, peak_lr=peak_lr)


def cooldowns(
    size: Size, budgets: tuple[int, ...], *, model: str = "160m", averages: tuple[Lawa, ...] = ()
) -> list[RunConfig]:
    """One run at the peak, and from it a linear cooldown to zero over the last tenth of every budget.

    With averages the run goes on to the last budget and has a checkpoint at every one, for its averages there.
    """
    starts = [end - end // COOLDOWN for end in budgets]
    saves = sorted(
        {*size.stable_steps(budgets[-1] if averages else starts[-1]), *starts, *(budgets if averages else ())}
    )
    stable = _run(size, "stable", phase=ConstantPhase(), save_steps=tuple(saves), model=model, averages=averages)
    cooldowns = []
    for start, end in zip(starts, budgets, strict=True):
        name = f"wsd-{amount_name(end * size.tokens_per_step)}"
        run = annealed(stable, name, start=start, save_steps=size.cooldown_steps(end))
        cooldowns.append(run.model_copy(update={"averages": ()}))
    return [stable, *cooldowns]
