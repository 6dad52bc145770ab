"""Two factors on a model of our own: the peak learning rate and the weight decay."""

from study.definition import Study
from study.recipes import parts
from train.model.presets import olmo2
from train.run.config import RunConfig

MODEL, TEXT = olmo2(hidden_size=96, layers=3, heads=4, intermediate_size=256), parts.SMALL_TEXT


@parts.recipe
def rate_and_decay(*, smoke: bool = False) -> Study:
    """Peak learning rate x weight decay, on the source of Python packages."""
    steps = 40 if smoke else 400

    def run(name: str, **factors: float) -> RunConfig:
        return parts.wsd_run(name, model=MODEL, text=TEXT, steps=steps, **factors)

    return parts.study(
        parts.sweep(run, peak_lr=[3e-3, 1e-2], weight_decay=[0.0, 0.1]),
        text=TEXT,
        quantization=parts.SMALL_QUANTIZATION,
        curvature=parts.SMALL_CURVATURE,
    )
