"""The demo: the OLMo2-7B learning-rate ablation in small, on text that every machine has."""

from curvature.settings import LineSettings, PlaneSettings, PredictionSettings
from dynamics.recipes import captions
from study.definition import Study
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.planes import NamedPlane
from study.recipes.parts import (
    DRAWS,
    SMALL_TEXT,
    data_of,
    learning_rate_name,
    recipe,
    study,
    sweep,
)
from study.soups import SoupSettings
from study.text_kinds import PackageSources
from train.model.presets import olmo2
from train.optimizers.adamw import AdamW
from train.run.config import RunConfig
from train.run.optimization import Anneal, CosinePhase, Lawa, ScheduleConfig

# The OLMo2-7B ablation (arXiv 2501.00656, section 4.1): cosine towards 5e12 tokens, left at step
# 72,000 of 4,194,304 tokens for a linear anneal over a third of the tokens before it. Seen from
# there the horizon is this many times as far as the start of the anneal.
HORIZON_OVER_ANNEAL_START = 5e12 / (72_000 * 4_194_304)
# AdamW forgets an update over 1 / (rate x weight decay) steps (arXiv 2405.13698). Up to the anneal
# the 7B's run with a peak of 6e-4 and a decay of 0.1 is 4.3 such times long, and so is the demo's
# with its lower peak. The other is a factor of 12 above, as four seeds do not decide between peaks
# a factor of 2 or 3 apart. With 640 steps there was no surge.
PEAKS, SAVES, ANNEALS_AT = (6e-3, 7.2e-2), (360, 720, 960), 720
WEIGHT_DECAY = round(72_000 * 6e-4 * 0.1 / (ANNEALS_AT * PEAKS[0]), 4)
# Enough to decide at 3 bits whether the anneal raises the error, and which peak has the larger one.
SEEDS = (1, 2, 3, 4)

TEXT = PackageSources(vocab_size=1024)
MODEL = olmo2(hidden_size=64, layers=2, heads=4, intermediate_size=192).model_copy(
    update={"vocab_size": TEXT.vocab_size}
)
SEQUENCE_LENGTH, BATCH = 128, 8
TOKENS_PER_STEP = SEQUENCE_LENGTH * BATCH


def run(name: str, peak_lr: float, *, saves: tuple[int, ...], smoke: bool) -> RunConfig:
    """Return a run with these checkpoints, which anneals; a smaller one for the profile smoke."""
    # A checkpoint has to be there, because the control branches off where the anneal starts.
    start = saves[0] if smoke else ANNEALS_AT
    # Two runs at a time, on a rank each, take less than one after the other on two ranks, which
    # exchange gradients and wait for each other. The smoke study trains data-parallel.
    micro_batch_size = BATCH // 2 if smoke else BATCH
    return RunConfig(
        name=name,
        seed=6198,
        precision="fp32",
        model=MODEL,
        data=data_of(TEXT, sequence_length=SEQUENCE_LENGTH, held_out_sequences=64),
        optimizer=AdamW(peak_lr=peak_lr, weight_decay=WEIGHT_DECAY),
        schedule=ScheduleConfig(
            warmup_tokens=(8 if smoke else 32) * TOKENS_PER_STEP,
            phase=CosinePhase(
                horizon_tokens=round(start * HORIZON_OVER_ANNEAL_START) * TOKENS_PER_STEP
            ),
            anneal=Anneal(start_step=start),
        ),
        # a window of five is shorter than a phase
        averages=(Lawa(interval_steps=4 if smoke else 16, window=5),),
        total_steps=saves[-1],
        batch_size=BATCH,
        micro_batch_size=micro_batch_size,
        save_steps=saves,
        evaluate_every_steps=12 if smoke else 240,
    )


@recipe
def tiny(*, smoke: bool = False) -> Study:
    """The OLMo2-7B learning-rate ablation in small: a near-constant rate, then an anneal or none.

    The anneal is linear, over a third of the tokens before it. Two peaks with four seeds each,
    0.2 million parameters; minutes on two cores.
    """
    saves = (48, 72) if smoke else SAVES
    quantization = QuantizationSettings(
        specs=("gptq-b3-g32",),
        methods=("gptq-b4-g32", "rtn-b3-g32"),
        by_block=("gptq-b3-g32",),
        calibration_sequences=64,
        calibration_seeds=DRAWS,
        eval_tokens=16_384,
        block_tokens=16_384,
    )
    if smoke:
        quantization = QuantizationSettings(
            specs=("gptq-b3-g32", "gptq-b4-g32"),
            methods=("rtn-b3-g32", "int8-t6"),
            along=("w4a4-g32-quarot",),
            by_block=("gptq-b3-g32",),
            calibration_sequences=16,
            calibration_seeds=2,
            eval_tokens=12_288,  # 22 documents of SMALL_TEXT; 20 give an interval
            block_tokens=12_288,
        )
    pairs = 4 if smoke else 8
    peaks = (3e-3, 3e-2) if smoke else PEAKS
    # The ends of the first peak's runs, of the first seed, at the same step.
    name, seed = learning_rate_name(peaks[0]), "" if smoke else f"-seed{SEEDS[0]}"
    stable = f"{name}-control{seed}@{saves[-1]}"
    points = {"constant rate": stable, "annealed": f"{name}{seed}@{saves[-1]}"}
    points["average"] = f"{stable}/lawa5x{4 if smoke else 16}"

    def of_peak(name: str, peak_lr: float) -> RunConfig:
        return run(name, peak_lr, saves=saves, smoke=smoke)

    return study(
        sweep(of_peak, peak_lr=peaks),
        sources=(
            "schedule: arXiv 2501.00656, section 4.1, figure 11",
            "quantization, curvature, averages: arXiv 2510.06213, sections 3 to 6, appendix C",
        ),
        text=SMALL_TEXT if smoke else TEXT,
        seeds=() if smoke else SEEDS,
        averaged="first seed",
        detailed="first seed",
        ranks=2 if smoke else 1,
        quantization=quantization,
        curvature=CurvatureSettings(
            pairs=pairs,
            norm_pairs=2,
            companion_pairs=pairs // 2,
            microbatch_sequences=2,
            fixed_sequences=2 if smoke else 4,
        ),
        step=PredictionSettings(microbatches=2 if smoke else 8),
        slice=PlaneSettings(grid=5 if smoke else 9, sequences=4 if smoke else 8),
        captions=captions.of_peaks("with 0.2M parameters and 1M tokens"),
        planes=(NamedPlane(name="ends", points=points),),
        # those of the step's microbatches, whose products are exact
        critical=LineSettings(sequences=4, batch_size=4) if smoke else None,
        averaged_steps=saves[-1:],
        soups=(SoupSettings(name="soup-anneal", steps=saves),) if smoke else (),
    )
