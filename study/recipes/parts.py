"""What recipes are put together from: names, steps, branches and texts."""

import math
from typing import Any

from study.settings import CurvatureSettings, QuantizationSettings
from study.text import PreparedText, StandardLibrary, TokenFile
from study.text_places import places_of
from train.config import RunConfig
from train.frozen import fingerprint
from train.settings import Anneal, BranchFrom, DataConfig

# arXiv 2510.06213, appendices A and D: calibrated on C4's second file, c4-train.00001-of-01024, and measured on some
# 600,000 tokens of RefinedWeb, of which aldakata/TrainingDynamicsQuantizationRobustness does not say which.
C4 = TokenFile(name="c4", dataset="allenai/c4", config="en", files="2")
REFINEDWEB = TokenFile(name="refinedweb", dataset="tiiuae/falcon-refinedweb", files="1", key="content")
EVAL_TOKENS = 600_000
WEB_SPECS = ("gptq-b3-g128", "gptq-b4-g128")
WEB_METHODS = (  # at the end of training; -paper is what arXiv 2510.06213 ran
    *("gptqmodel-b3-g128-paper", "gptqmodel-b4-g128-paper", "rtn-b3-g128", "rtn-b4-g128"),
    *("awq-b3-g128", "awq-b4-g128", "nf4-g64", "int8-t6"),
)

# The profile smoke: the same structure, minutes on two cores.
SMOKE = "-smoke"
SMALL_TEXT = StandardLibrary(vocab_size=1024, held_out_percent=10, held_out_characters=2400)
SMALL_QUANTIZATION = QuantizationSettings(
    specs=("gptq-b3-g32", "gptq-b4-g32"),
    methods=("rtn-b3-g32",),
    calibration_sequences=32,
    eval_tokens=8_192,
    block_tokens=4_096,
)
SMALL_CURVATURE = CurvatureSettings(
    pairs=4,
    norm_pairs=2,
    companion_pairs=2,
    microbatch_sequences=2,
    fixed_sequences=4,
    tolerance=1e-2,
    step_microbatches=2,
    slice_grid=5,
    slice_sequences=4,
)


def learning_rate_name(peak_lr: float) -> str:
    """Name of a run after its peak learning rate: 0.003 -> 'lr3e-3', 0.00025 -> 'lr2.5e-4'."""
    exponent = math.floor(math.log10(peak_lr))
    return f"lr{round(peak_lr / 10**exponent, 6):g}e{exponent}"


def amount_name(tokens: float) -> str:
    """A number of tokens in three digits: 50e9 -> '50b', 28311552000 -> '28.3b', 32768 -> '32.8k'."""
    for unit, letter in ((1e12, "t"), (1e9, "b"), (1e6, "m"), (1e3, "k")):
        if tokens >= unit:
            return f"{tokens / unit:.3g}{letter}"
    return f"{tokens:g}"


def spread(start: int, end: int, count: int) -> tuple[int, ...]:
    """`count` steps behind `start`, evenly spaced up to `end`, which is the last of them."""
    return tuple(start + round(part * (end - start) / count) for part in range(1, count + 1))


def annealed(parent: RunConfig, name: str, *, start: int, save_steps: tuple[int, ...]) -> RunConfig:
    """The run that leaves `parent` at step `start` for a linear anneal to zero, on the data that comes next there."""
    changes: dict[str, Any] = {
        "name": name,
        "schedule": parent.schedule.model_copy(update={"anneal": Anneal(start_step=start)}),
        "branch_from": BranchFrom(run=f"../{parent.name}", step=start, fingerprint=fingerprint(parent)),
        "total_steps": save_steps[-1],
        "save_steps": save_steps,
    }
    return RunConfig.model_validate(dict(parent) | changes)


def web_text(tokenizer: str, train: TokenFile | None = None) -> PreparedText:
    """The paper's texts to calibrate on and to measure on; the name of each file says whose tokens it holds."""

    def tokenized(file: TokenFile) -> TokenFile:
        return file.model_copy(update={"name": f"{file.name}--{tokenizer.replace('/', '--')}"})

    return PreparedText(
        tokenizer=tokenizer,
        train=tokenized(train) if train else None,
        held_out=tokenized(REFINEDWEB),
        calibration=tokenized(C4),
    )


def data_of(
    text: StandardLibrary | PreparedText, *, sequence_length: int, held_out_sequences: int, **settings: Any
) -> DataConfig:
    """What a run of a study with this text reads; `settings` are further ones of DataConfig."""
    places = {use: from_run(place) for use, place in places_of(text).items() if use != "calibration"}
    return DataConfig.model_validate(
        {**places, "sequence_length": sequence_length, "held_out_sequences": held_out_sequences, **settings}
    )


def from_run(place: str) -> str:
    """Return a place that a command names as a run's directory sees it.

    >>> from_run("{study}/data/train")
    '../data/train'
    """
    return place.replace("{study}", "..", 1).replace("{root}", "../..", 1)
