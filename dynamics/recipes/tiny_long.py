"""The demo's model at the tokens per parameter of the OLMo2-7B ablation, and under a cosine."""

from curvature.settings import LineSettings, PlaneSettings, PredictionSettings
from dynamics.recipes import captions
from dynamics.recipes.demo import MODEL
from dynamics.recipes.pythia import COSINE_FLOOR
from study.definition import Study
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.recipes.parts import (
    DRAWS,
    SMALL_CRITICAL,
    SMALL_CURVATURE,
    SMALL_PLANE,
    SMALL_TEXT,
    data_of,
    learning_rate_name,
    recipe,
    spread,
    study,
)
from study.text_kinds import MORE_PACKAGES, PackageSources
from train.optimizers.adamw import AdamW
from train.run.config import RunConfig
from train.run.optimization import Anneal, ConstantPhase, CosinePhase, Lawa, ScheduleConfig

# 21M tokens to train on: no run of 13.1M reads any of them twice.
TEXT = PackageSources(packages=MORE_PACKAGES, vocab_size=MODEL.vocab_size)
SEQUENCE_LENGTH, BATCH = 128, 16
# Tokens per parameter, of 0.24M: 41 before the anneal, as the 7B's 302e9 are, and a third of that
# in it, as in the 7B's longer one. There are ten checkpoints before the anneal and four in it.
START, END = 4_800, 6_400
SAVES = (*spread(0, START, 10), *spread(START, END, 4))
SMOKE_START, SMOKE_END = 24, 32
SMOKE_SAVES = (*spread(0, SMOKE_START, 2), SMOKE_END)
# A factor of four, as between the lowest and the highest peak of the OLMo2-7B ablation. By `study
# power` on the demo's table a difference of 10% in the KL divergence takes 20 seeds, and more text
# or more draws help little. Four seeds show one of 30%.
PEAKS, SEEDS = (6e-3, 2.4e-2), (1, 2, 3, 4)
# As many times 1 / (rate x weight decay) steps up to the anneal as the 7B's with a peak of 6e-4.
WEIGHT_DECAY = round(72_000 * 6e-4 * 0.1 / (START * 6e-3), 4)

QUANTIZATION = QuantizationSettings(
    specs=("gptq-b3-g32",),
    methods=("gptq-b4-g32", "rtn-b3-g32"),
    by_block=("gptq-b3-g32",),
    calibration_sequences=64,
    calibration_seeds=DRAWS,
    eval_tokens=65_536,
    block_tokens=16_384,
)
SMOKE_QUANTIZATION = QUANTIZATION.model_copy(
    update={"calibration_sequences": 16, "calibration_seeds": 2}
    | {"eval_tokens": 12_288, "block_tokens": 12_288}
)
CURVATURE = CurvatureSettings(
    pairs=16,
    norm_pairs=2,
    companion_pairs=8,
    microbatch_sequences=2,
    fixed_sequences=4,
)


def run(schedule: str, peak_lr: float, *, smoke: bool) -> RunConfig:
    """Return a run under WSD, with averages along its constant rate, or under a cosine."""
    start, saves = (SMOKE_START, SMOKE_SAVES) if smoke else (START, SAVES)
    text = SMALL_TEXT if smoke else TEXT
    tokens_per_step = SEQUENCE_LENGTH * BATCH
    # The 7B's warm-up is 2,000 of the 72,000 steps before its anneal.
    warmup_tokens = round(start * 2_000 / 72_000) * tokens_per_step
    # The 7B's averages take in weights at 144 intervals before the anneal.
    averages = (Lawa(interval_steps=2 if smoke else 32, window=5),)
    wsd = ScheduleConfig(
        warmup_tokens=warmup_tokens, phase=ConstantPhase(), anneal=Anneal(start_step=start)
    )
    cosine = ScheduleConfig(
        warmup_tokens=warmup_tokens,
        phase=CosinePhase(horizon_tokens=saves[-1] * tokens_per_step, floor=COSINE_FLOOR),
    )
    return RunConfig(
        name=f"{schedule}-{learning_rate_name(peak_lr)}",
        seed=6198,
        precision="fp32",
        model=MODEL,
        data=data_of(text, sequence_length=SEQUENCE_LENGTH, held_out_sequences=64),
        optimizer=AdamW(peak_lr=peak_lr, weight_decay=WEIGHT_DECAY),
        schedule=wsd if schedule == "wsd" else cosine,
        averages=averages if schedule == "wsd" else (),
        total_steps=saves[-1],
        batch_size=BATCH,
        micro_batch_size=BATCH // 2 if smoke else BATCH,
        save_steps=saves,
        evaluate_every_steps=8 if smoke else 160,
    )


@recipe
def tiny_long(*, smoke: bool = False) -> Study:
    """The demo's model at 55 tokens per parameter: WSD and cosine, some two hours on two cores.

    A constant rate over 9.8M tokens with ten checkpoints, then a linear anneal over 3.3M or none,
    and a cosine to a tenth of the peak over the same 13.1M tokens. Two peaks with four seeds each.
    The text is read once; half of its longer lines are in it more than once.
    """
    start, end = (SMOKE_START, SMOKE_END) if smoke else (START, END)
    runs = [
        run(schedule, peak_lr, smoke=smoke) for peak_lr in PEAKS for schedule in ("wsd", "cosine")
    ]
    return study(
        runs,
        sources=(
            "the comparison of schedules: arXiv 2510.06213, sections 4.2 and 5.2, appendix C",
            "warm-up, weight decay, intervals of the averages: shares of the OLMo2-7B ablation,"
            " arXiv 2501.00656, section 4.1, as the recipe olmo2-7b-lr has it",
            "ours: peaks, seeds, batch, length, the cosine's floor",
        ),
        text=SMALL_TEXT if smoke else TEXT,
        seeds=() if smoke else SEEDS,
        detailed="first seed",
        ranks=1,
        quantization=SMOKE_QUANTIZATION if smoke else QUANTIZATION,
        curvature=SMALL_CURVATURE if smoke else CURVATURE,
        step=PredictionSettings(microbatches=2 if smoke else 8),
        slice=SMALL_PLANE if smoke else PlaneSettings(grid=9, sequences=8),
        critical=SMALL_CRITICAL if smoke else LineSettings(sequences=16, batch_size=16),
        captions=captions.SCHEDULES | captions.AVERAGES,
        averaged_steps=(*(step for step in runs[0].save_steps if step <= start), end),
    )
