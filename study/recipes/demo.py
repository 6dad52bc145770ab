"""The demo: the OLMo2-7B learning-rate ablation in small, on text that every machine has."""

from study.definition import Study
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.recipes.parts import data_of, recipe, study, sweep
from study.soups import SoupSettings
from study.text.kinds import PackageSources
from train.model.config import ModelConfig
from train.run.config import RunConfig
from train.run.optimization import Anneal, CosinePhase, Lawa, OptimizerConfig, ScheduleConfig

# The OLMo2-7B ablation (arXiv 2501.00656, section 4.1): cosine towards 5e12 tokens, left at step
# 72,000 of 4,194,304 tokens for a linear anneal. Seen from there the horizon is this many times as
# far as the start of the anneal.
HORIZON_OVER_ANNEAL_START = 5e12 / (72_000 * 4_194_304)

MODEL = ModelConfig(
    vocab_size=2048,
    hidden_size=96,
    intermediate_size=288,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
)
TEXT = PackageSources(vocab_size=MODEL.vocab_size)
SEQUENCE_LENGTH, BATCH = 128, 16
TOKENS_PER_STEP = SEQUENCE_LENGTH * BATCH
SOUP_STABLE = SoupSettings(name="soup-stable", steps=(192, 320, 448))


@recipe
def tiny(*, smoke: bool = False) -> Study:
    """The OLMo2-7B learning-rate ablation in small: a near-constant rate, then an anneal to 0.

    The anneal is linear. About a million parameters; minutes on two cores.
    """
    warmup, anneal = (8, 48) if smoke else (32, 448)
    saves = (48, 72) if smoke else (64, 192, 320, 448, 512, 576, 640)
    # Two runs at a time, on a rank each, take less than one after the other on two ranks, which
    # exchange gradients and wait for each other. The smoke study trains data-parallel.
    ranks = 2 if smoke else 1

    def run(name: str, peak_lr: float) -> RunConfig:
        horizon = round(anneal * HORIZON_OVER_ANNEAL_START) * TOKENS_PER_STEP
        return RunConfig(
            name=name,
            seed=6198,
            precision="fp32",
            model=MODEL,
            data=data_of(TEXT, sequence_length=SEQUENCE_LENGTH, held_out_sequences=64),
            optimizer=OptimizerConfig(peak_lr=peak_lr),
            schedule=ScheduleConfig(
                warmup_tokens=warmup * TOKENS_PER_STEP,
                phase=CosinePhase(horizon_tokens=horizon),
                anneal=Anneal(start_step=anneal),
            ),
            # a window of five is shorter than a phase
            averages=(Lawa(interval_steps=4 if smoke else 16, window=5),),
            total_steps=saves[-1],
            batch_size=BATCH,
            micro_batch_size=BATCH // ranks,
            save_steps=saves,
            evaluate_every_steps=12 if smoke else 64,
        )

    quantization = QuantizationSettings(
        specs=("gptq-b3-g32", "gptq-b4-g32"),
        methods=(
            *("rtn-b3-g32", "gptqmodel-b3-g32", "awq-b3-g32", "int8-t6"),
            *("gptq-b3-g32-had", "w4a4-g32", "w4a4-g32-quarot", "nvfp4"),
        ),
        by_block=("gptq-b3-g32", "gptq-b4-g32", "gptq-b8-g32"),
        calibration_sequences=64,
        eval_tokens=32_768,
        block_tokens=16_384,
    )
    if smoke:  # methods of other libraries spend many seconds on their imports
        quantization = QuantizationSettings(
            specs=quantization.specs,
            methods=("rtn-b3-g32", "int8-t6"),
            along=("w4a4-g32-quarot",),
            by_block=("gptq-b3-g32",),
            calibration_sequences=32,
            eval_tokens=16_384,
            block_tokens=16_384,
        )
    pairs = 4 if smoke else 16
    soup = SoupSettings(name="soup-anneal", steps=saves[-2:] if smoke else saves[-3:])
    return study(
        sweep(run, peak_lr=(3e-3, 3e-2) if smoke else (1e-3, 3e-3, 1e-2, 3e-2)),
        sources=(
            "schedule: arXiv 2501.00656, section 4.1, figure 11",
            "quantization, curvature, averages: arXiv 2510.06213, sections 3 to 6, appendix C",
        ),
        text=TEXT,
        ranks=ranks,
        quantization=quantization,
        curvature=CurvatureSettings(
            pairs=pairs,
            norm_pairs=2,
            companion_pairs=pairs // 2,
            microbatch_sequences=2,
            fixed_sequences=4,
            step_microbatches=2 if smoke else 8,
            slice_grid=5 if smoke else 9,
            slice_sequences=8,
        ),
        averaged_steps=saves if smoke else (192, 448, 640),
        soups=(soup,) if smoke else (SOUP_STABLE, soup),
    )
