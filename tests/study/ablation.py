"""The study of all tests that read results: four peaks, one training of each, and no controls."""

from curvature.settings import PlaneSettings, PredictionSettings
from study.definition import Study
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.recipes.parts import data_of, sweep
from study.soups import SoupSettings
from study.text_kinds import PackageSources
from train.model.presets import olmo2
from train.optimizers.adamw import AdamW
from train.run.config import RunConfig
from train.run.optimization import Anneal, CosinePhase, Lawa, ScheduleConfig

SAVES = (64, 192, 320, 448, 512, 576, 640)
ANNEAL = 448
TEXT = PackageSources(vocab_size=2048)
MODEL = olmo2(hidden_size=96, layers=4, heads=4, intermediate_size=288)


def run(name: str, peak_lr: float) -> RunConfig:
    """A near-constant rate, then an anneal to 0: 640 steps of 2,048 tokens."""
    return RunConfig(
        name=name,
        seed=6198,
        precision="fp32",
        model=MODEL.model_copy(update={"vocab_size": TEXT.vocab_size}),
        data=data_of(TEXT, sequence_length=128, held_out_sequences=64),
        optimizer=AdamW(peak_lr=peak_lr),
        schedule=ScheduleConfig(
            warmup_tokens=32 * 2048,
            phase=CosinePhase(horizon_tokens=7417 * 2048),
            anneal=Anneal(start_step=ANNEAL),
        ),
        averages=(Lawa(interval_steps=16, window=5),),
        total_steps=SAVES[-1],
        batch_size=16,
        micro_batch_size=16,
        save_steps=SAVES,
        evaluate_every_steps=64,
    )


def tiny() -> Study:
    """Return the study."""
    return Study(
        name="tiny",
        description="The ablation of the tests",
        sources=("arXiv 2510.06213",),
        ranks=1,
        sized_for="cpu",
        text=TEXT,
        runs=tuple(sweep(run, peak_lr=(1e-3, 3e-3, 1e-2, 3e-2))),
        quantization=QuantizationSettings(
            specs=("gptq-b3-g32", "gptq-b4-g32"),
            methods=(
                *("rtn-b3-g32", "gptqmodel-b3-g32", "awq-b3-g32", "int8-t6"),
                *("gptq-b3-g32-had", "w4a4-g32", "w4a4-g32-quarot", "nvfp4"),
            ),
            by_block=("gptq-b3-g32", "gptq-b4-g32", "gptq-b8-g32"),
            calibration_sequences=64,
            calibration_seeds=3,
            eval_tokens=32_768,
            block_tokens=16_384,
        ),
        curvature=CurvatureSettings(
            pairs=16, norm_pairs=2, companion_pairs=8, microbatch_sequences=2, fixed_sequences=4
        ),
        step=PredictionSettings(microbatches=8),
        slice=PlaneSettings(grid=9, sequences=8),
        averaged_steps=(192, 448, 640),
        soups=(
            SoupSettings(name="soup-stable", steps=(192, 320, 448)),
            SoupSettings(name="soup-anneal", steps=(512, 576, 640)),
        ),
    )
