"""The demo: the OLMo2-7B learning-rate ablation in small, on text that every machine has."""

from dataclasses import dataclass

from study.recipes.parts import data_of, learning_rate_name
from study.settings import CurvatureSettings, QuantizationSettings, SoupSettings, Study
from study.text import StandardLibrary
from train.config import RunConfig
from train.settings import Anneal, CosinePhase, Lawa, ModelConfig, OptimizerConfig, ScheduleConfig

# The OLMo2-7B ablation (arXiv 2501.00656, section 4.1): cosine towards 5e12 tokens, left at step 72,000 of 4,194,304
# tokens for a linear anneal. Seen from there the horizon is this many times as far as the start of the anneal.
HORIZON_OVER_ANNEAL_START = 5e12 / (72_000 * 4_194_304)

TINY_PEAKS = (1e-3, 3e-3, 1e-2, 3e-2)
TINY_MODEL = ModelConfig(
    vocab_size=2048,
    hidden_size=96,
    intermediate_size=288,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
)
TINY_TEXT = StandardLibrary(vocab_size=TINY_MODEL.vocab_size, held_out_percent=10, held_out_characters=2400)
TINY_SEQUENCE_LENGTH = 128
TINY_BATCH = 16
TINY_MICRO_BATCH = 8
TINY_TOKENS_PER_STEP = TINY_SEQUENCE_LENGTH * TINY_BATCH


@dataclass(frozen=True)
class _TinySize:
    """What differs between the profiles of `tiny`; steps are optimizer steps of 2,048 tokens.

    From each of `averaged_steps`, `lawa` looks back less far than to the start of the phase: a window lies within one.
    """

    peaks: tuple[float, ...]
    warmup_steps: int
    anneal_start: int
    total_steps: int
    save_steps: tuple[int, ...]
    evaluate_every_steps: int
    lawa: Lawa
    averaged_steps: tuple[int, ...]
    soups: tuple[SoupSettings, ...]
    methods: tuple[str, ...]
    eval_tokens: int
    calibration_sequences: int
    by_block: tuple[str, ...]
    block_tokens: int
    pairs: int
    step_microbatches: int
    slice_grid: int


_TINY_FULL = _TinySize(
    peaks=TINY_PEAKS,
    warmup_steps=32,
    anneal_start=448,
    total_steps=640,
    save_steps=(64, 192, 320, 448, 512, 576, 640),
    evaluate_every_steps=64,
    lawa=Lawa(interval_steps=16, window=5),
    averaged_steps=(192, 448, 640),
    soups=(
        SoupSettings(name="soup-stable", steps=(192, 320, 448)),
        SoupSettings(name="soup-anneal", steps=(512, 576, 640)),
    ),
    methods=("rtn-b3-g32", "gptqmodel-b3-g32", "awq-b3-g32", "int8-t6"),
    eval_tokens=32_768,
    calibration_sequences=64,
    by_block=("gptq-b3-g32", "gptq-b4-g32", "gptq-b8-g32"),
    block_tokens=16_384,
    pairs=16,
    step_microbatches=8,
    slice_grid=9,
)
_TINY_SMOKE = _TinySize(
    peaks=(3e-3, 3e-2),
    warmup_steps=8,
    anneal_start=48,
    total_steps=72,
    save_steps=(48, 72),
    evaluate_every_steps=12,
    lawa=Lawa(interval_steps=4, window=5),
    averaged_steps=(48, 72),
    soups=(SoupSettings(name="soup-anneal", steps=(48, 72)),),
    methods=("rtn-b3-g32", "int8-t6"),  # those of other libraries spend many seconds on their imports
    eval_tokens=8_192,
    calibration_sequences=32,
    by_block=("gptq-b3-g32",),
    block_tokens=8_192,
    pairs=4,
    step_microbatches=2,
    slice_grid=5,
)


def _tiny_run(peak_lr: float, size: _TinySize) -> RunConfig:
    return RunConfig(
        name=learning_rate_name(peak_lr),
        seed=6198,
        precision="fp32",
        model=TINY_MODEL,
        data=data_of(TINY_TEXT, sequence_length=TINY_SEQUENCE_LENGTH, held_out_sequences=64),
        optimizer=OptimizerConfig(peak_lr=peak_lr),
        schedule=ScheduleConfig(
            warmup_tokens=size.warmup_steps * TINY_TOKENS_PER_STEP,
            phase=CosinePhase(
                horizon_tokens=round(size.anneal_start * HORIZON_OVER_ANNEAL_START) * TINY_TOKENS_PER_STEP
            ),
            anneal=Anneal(start_step=size.anneal_start),
        ),
        averages=(size.lawa,),
        total_steps=size.total_steps,
        batch_size=TINY_BATCH,
        micro_batch_size=TINY_MICRO_BATCH,
        save_steps=size.save_steps,
        evaluate_every_steps=size.evaluate_every_steps,
    )


def _tiny_of_size(name: str, size: _TinySize) -> Study:
    return Study(
        name=name,
        description="The OLMo2-7B learning-rate ablation in small: a near-constant rate, then a linear anneal to 0",
        sources=(
            "schedule: arXiv 2501.00656, section 4.1, figure 11",
            "quantization, curvature, averages: arXiv 2510.06213, sections 3 to 6, appendix C",
        ),
        ranks=2,
        sized_for="cpu",
        text=TINY_TEXT,
        runs=tuple(_tiny_run(peak_lr, size) for peak_lr in size.peaks),
        quantization=QuantizationSettings(
            specs=("gptq-b3-g32", "gptq-b4-g32"),
            methods=size.methods,
            by_block=size.by_block,
            calibration_sequences=size.calibration_sequences,
            eval_tokens=size.eval_tokens,
            block_tokens=size.block_tokens,
        ),
        curvature=CurvatureSettings(
            pairs=size.pairs,
            norm_pairs=2,
            companion_pairs=size.pairs // 2,
            microbatch_sequences=2,
            fixed_sequences=4,
            tolerance=1e-2,
            step_microbatches=size.step_microbatches,
            slice_grid=size.slice_grid,
            slice_sequences=8,
        ),
        averaged_steps=size.averaged_steps,
        soups=size.soups,
    )


def tiny() -> Study:
    """About a million parameters on the standard library's source; minutes on two cores."""
    return _tiny_of_size("tiny", _TINY_FULL)


def tiny_smoke() -> Study:
    """The same study with two learning rates, two checkpoints and a short training."""
    return _tiny_of_size("tiny-smoke", _TINY_SMOKE)
