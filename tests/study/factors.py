"""Small recipes of a user's own: factors of every kind, with seeds and without."""

from collections.abc import Sequence
from typing import Any

from study.definition import Study
from study.recipes import parts
from train.data.config import RepetitionFilter
from train.model.presets import olmo2
from train.optimizers.adamw import AdamW
from train.run.config import RunConfig
from train.run.optimization import Anneal, ConstantPhase, ScheduleConfig

TEXT, STEPS = parts.SMALL_TEXT, 64
QUANTIZATION = parts.SMALL_QUANTIZATION.model_copy(
    update={"by_block": ("gptq-b3-g32",), "along": ("nvfp4",)}
)


def of(name: str, runs: Sequence[RunConfig], seeds: Sequence[int] = ()) -> Study:
    """The study of some runs, their controls and seeds, with all kinds of results but tasks."""
    return parts.study(
        runs,
        name=name,
        text=TEXT,
        quantization=QUANTIZATION,
        curvature=parts.SMALL_CURVATURE,
        seeds=seeds,
    )


def run(name: str, *, layers: int = 3, width: int = 96, **settings: Any) -> RunConfig:
    """A run that anneals over the last of four checkpoints."""
    model = olmo2(hidden_size=width, layers=layers, heads=4, intermediate_size=4 * width)
    return parts.wsd_run(name, model=model, text=TEXT, steps=STEPS, **{"peak_lr": 3e-3, **settings})


def with_data(name: str, **data: Any) -> RunConfig:
    """A run with other settings of its data."""
    default = parts.data_of(TEXT, sequence_length=128, held_out_sequences=16)
    return run(name, data=default.model_copy(update=data))


def with_limit(name: str, limit: int | None) -> RunConfig:
    """A run that masks repetitions from so many on, or none."""
    return with_data(name, repetition_filter=limit and RepetitionFilter(max_count=limit))


def with_optimizer(name: str, **optimizer: Any) -> RunConfig:
    """A run with other settings of its optimizer."""
    return run(name, optimizer=AdamW(peak_lr=3e-3, **optimizer))


def with_betas(name: str, betas: tuple[float, float]) -> RunConfig:
    """A run with both betas, as one factor."""
    return with_optimizer(name, beta1=betas[0], beta2=betas[1])


def with_corpus(name: str, corpus: str) -> RunConfig:
    """A run on another token file."""
    return with_data(name, train=corpus)


def with_warmup(name: str, warmup_tokens: int) -> RunConfig:
    """A run with another warm-up."""
    anneal = Anneal(start_step=3 * STEPS // 4)
    schedule = ScheduleConfig(warmup_tokens=warmup_tokens, phase=ConstantPhase(), anneal=anneal)
    return run(name, schedule=schedule)


def with_start(name: str, start: int) -> RunConfig:
    """A run whose anneal starts at another of its checkpoints."""
    schedule = ScheduleConfig(
        warmup_tokens=0, phase=ConstantPhase(), anneal=Anneal(start_step=start)
    )
    return run(name, schedule=schedule)
