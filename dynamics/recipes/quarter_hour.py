"""An OLMo2 of 25M parameters at two peaks, on text that every machine has, within 10 minutes."""

from dynamics.recipes import captions
from dynamics.recipes.demo import MODEL as SMOKE_MODEL
from study.definition import Study
from study.design import with_controls
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.recipes.parts import (
    SMALL_CURVATURE,
    SMALL_QUANTIZATION,
    SMALL_TEXT,
    data_of,
    lean,
    recipe,
    spread,
    study,
    sweep,
    wsd_run,
)
from study.text_kinds import MORE_PACKAGES, PackageSources
from train.model.presets import olmo2
from train.run.config import RunConfig
from train.run.optimization import Lawa
from train.run.saving import SavingConfig

TEXT = PackageSources(packages=MORE_PACKAGES, vocab_size=4096)
MODEL = olmo2(hidden_size=512, layers=6, heads=8, intermediate_size=1536)
SEQUENCE_LENGTH, BATCH = 1024, 64
END = 1_800
START = spread(0, END, 4)[2]  # of the anneal of wsd_run
PEAKS = (1e-3, 4e-3)


def run(name: str, peak_lr: float) -> RunConfig:
    """Return a run of 118M tokens, of which the last quarter is the anneal."""
    return wsd_run(
        name,
        model=MODEL,
        text=TEXT,
        steps=END,
        peak_lr=peak_lr,
        precision="bf16",
        data=data_of(TEXT, sequence_length=SEQUENCE_LENGTH, held_out_sequences=64),
        batch_size=BATCH,
        micro_batch_size=32,
        save_steps=(*spread(0, START, 3), END),
        saving=SavingConfig(asynchronous=True, restart_every_steps=600),
        evaluate_every_steps=150,
        averages=(Lawa(interval_steps=10, window=5),),
    )


def smoke_run(name: str, peak_lr: float) -> RunConfig:
    """Return a run of two layers that a CPU trains in seconds."""
    averages = (Lawa(interval_steps=2, window=5),)
    return wsd_run(
        name, model=SMOKE_MODEL, text=SMALL_TEXT, steps=40, peak_lr=peak_lr, averages=averages
    )


@recipe
def olmo2_quarter_hour(*, smoke: bool = False) -> Study:
    """OLMo2 with 25M parameters at two peaks, 118M tokens each: ten minutes of one H100 or H200.

    A constant rate over 88M tokens, then a linear anneal over 29M or none. Text is the source of
    packages, so that no step needs a network. It has some 16M tokens, which a run reads seven
    times.
    """
    make = smoke_run if smoke else run
    runs = sweep(make, peak_lr=PEAKS)
    averaged_steps = (runs[0].total_steps,)
    quantization = QuantizationSettings(
        specs=("gptq-b3-g128",),
        methods=("gptq-b4-g128", "rtn-b3-g128"),
        calibration_sequences=64,
        calibration_seeds=2,
        eval_tokens=65_536,
        block_tokens=65_536,
    )
    curvature = CurvatureSettings(
        lambda_max=False,
        pairs=8,
        norm_pairs=2,
        companion_pairs=4,
        microbatch_sequences=4,
        fixed_sequences=4,
    )
    return study(
        lean(with_controls(runs), averaged_steps),
        sources=(
            "schedule and measurements in the form of the OLMo2-7B ablation: arXiv 2501.00656,"
            " section 4.1, and arXiv 2510.06213, section 5.1",
            "ours: model, text, peaks, length and all that is fewer, made for ten minutes",
        ),
        text=SMALL_TEXT if smoke else TEXT,
        ranks=1,
        sized_for="cpu" if smoke else "cuda",
        quantization=SMALL_QUANTIZATION if smoke else quantization,
        curvature=SMALL_CURVATURE if smoke else curvature,
        captions=captions.of_peaks("with 25M parameters and 118M tokens"),
        averaged_steps=averaged_steps,
    )
