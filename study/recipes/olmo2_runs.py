"""The runs and the study of OLMo2's learning-rate ablation at any size; `study.recipes.olmo2` has the sizes."""

from dataclasses import dataclass
from typing import Literal

from study.recipes.parts import (
    EVAL_TOKENS,
    WEB_METHODS,
    WEB_SPECS,
    amount_name,
    annealed,
    data_of,
    learning_rate_name,
    spread,
    web_text,
)
from study.settings import CurvatureSettings, QuantizationSettings, SoupSettings, Study, Varied
from study.text import PreparedText, StandardLibrary, TokenFile
from train.config import RunConfig
from train.settings import (
    CosinePhase,
    Lawa,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RepetitionFilter,
    SavingConfig,
    ScheduleConfig,
)

SOURCES = (
    "the ablation: arXiv 2501.00656, section 4.1, figure 11, table 8",
    "its settings: allenai/OLMo at 0959703a, configs/peteish7-google.yaml, scripts/augusta/peteish7-*-launch.sh",
    "architecture, optimizer, data: allenai/OLMo, configs/official-1124/OLMo2-7B-stage1.yaml",
    "models of 190M and 30M: allenai/OLMo-core at fa6c5014, src/olmo_core/nn/transformer/config.py",
    "quantization: arXiv 2510.06213, section 5.1, figure 23, appendices A, D; "
    "aldakata/TrainingDynamicsQuantizationRobustness, gptqmodel_quantize.py",
)
# Tokens of the 7B ablation. Ai2's scripts leave the long cosine at step 72,000 and count anneals in whole steps of
# 4,194,304 tokens; only the three higher rates have the long anneal.
WARMUP_TOKENS = 2_000 * 4_194_304
ANNEALS_AT = 72_000 * 4_194_304
SHORT_ANNEAL, LONG_ANNEAL = 50e9, 100e9
HORIZON, SHORT_HORIZON = 5e12, 300e9

TEXT = web_text(
    "allenai/OLMo-2-1124-7B",
    TokenFile(
        name="olmo-mix-1124",
        origin="python -m train index FILES --dtype uint32 --eos 100257, where FILES are OLMo-mix-1124's token files "
        "in the order of data.paths in allenai/OLMo, configs/official-1124/OLMo2-7B-stage1.yaml",
    ),
)
QUANTIZATION = QuantizationSettings(
    specs=WEB_SPECS,
    methods=WEB_METHODS,
    calibration_sequences=256,
    eval_tokens=EVAL_TOKENS,
    block_tokens=EVAL_TOKENS // 4,
    dtype="bf16",
)

UNSPLIT = ParallelConfig()
SAVING = SavingConfig(asynchronous=True, restart_every_steps=500)


@dataclass(frozen=True)
class Size:
    """What differs between the sizes of the ablation.

    Attributes:
        divisor: of every number of tokens, so that all sizes go through the same shares of one schedule.
        peaks: learning rates, the lowest first.
        parent_saves: checkpoints of a run up to its anneals, evenly spaced.
        anneal_saves: checkpoints of an anneal: the error of quantization surges there.
        intervals: parts of the run up to its anneals after which it is evaluated and averages take in its weights: 144
            are 500 of 72,000 steps, as far as arXiv 2510.06213 has them apart (appendix C).
        averaged: parts of the run up to its anneals after which averages are quantized.
        anneals: tokens of the 7B's anneals; the lowest peak has the shortest one only.
        small: of the profile smoke.
        controlled: a run trains on at its rate to the end of its last anneal, with a checkpoint wherever the anneal has
            one, so that the effect of the anneal is separated from that of the tokens.
    """

    model: ModelConfig
    divisor: int
    batch_size: int
    peaks: tuple[float, ...]
    micro_batch_size: int
    curvature: CurvatureSettings | None
    quantization: QuantizationSettings = QUANTIZATION
    text: StandardLibrary | PreparedText = TEXT
    sequence_length: int = 4096
    held_out_sequences: int = 256
    parent_saves: int = 18
    anneal_saves: int = 8
    intervals: int = 144
    averaged: int = 3
    anneals: tuple[float, ...] = (SHORT_ANNEAL, LONG_ANNEAL)
    controlled: bool = False
    small: bool = False
    ranks: int = 8
    precision: Literal["fp32", "bf16"] = "bf16"
    parallel: ParallelConfig = UNSPLIT
    saving: SavingConfig = SAVING

    def steps(self, tokens: float) -> int:
        """Steps of this size that stand for so many tokens of the 7B ablation."""
        return round(tokens / self.divisor / (self.batch_size * self.sequence_length))


def _parent(size: Size, peak_lr: float, horizon: float) -> RunConfig:
    start, every = size.steps(ANNEALS_AT), size.steps(ANNEALS_AT) // size.intervals
    save_steps = spread(0, start, size.parent_saves)
    if size.controlled:
        save_steps += spread(start, start + size.steps(size.anneals[-1]), size.anneal_saves)
    return RunConfig(
        name=learning_rate_name(peak_lr),
        seed=6198,
        precision=size.precision,
        model=size.model,
        data=data_of(
            size.text,
            sequence_length=size.sequence_length,
            held_out_sequences=size.held_out_sequences,
            order="olmo",
            repetition_filter=RepetitionFilter(),
        ),
        optimizer=OptimizerConfig(peak_lr=peak_lr),
        schedule=ScheduleConfig(
            warmup_tokens=round(WARMUP_TOKENS / size.divisor),
            phase=CosinePhase(horizon_tokens=round(horizon / size.divisor)),
        ),
        averages=(Lawa(interval_steps=every, window=5),),
        parallel=size.parallel,
        saving=size.saving,
        total_steps=save_steps[-1],
        batch_size=size.batch_size,
        micro_batch_size=size.micro_batch_size,
        save_steps=save_steps,
        evaluate_every_steps=every,
    )


def ablation(name: str, size: Size, description: str, horizon: float = HORIZON) -> Study:
    """Per peak a run up to the anneals, or on to their end, and its anneals to zero; see `Size.anneals`."""
    runs, labels, groups, start = [], {}, {}, size.steps(ANNEALS_AT)
    for peak_lr in size.peaks:
        parent = _parent(size, peak_lr, horizon)
        runs.append(parent)
        labels[parent.name], groups[parent.name] = f"{peak_lr:g}", "no anneal"
        for tokens in size.anneals if peak_lr > size.peaks[0] else size.anneals[:1]:
            end = start + size.steps(tokens)
            length = amount_name((end - start) * parent.tokens_per_step)
            run = annealed(
                parent,
                f"{parent.name}-anneal{length}",
                start=start,
                save_steps=spread(start, end, size.anneal_saves),
            )
            runs.append(run)
            labels[run.name] = f"{peak_lr:g}, {length.upper()} anneal"
            groups[run.name] = f"{length.upper()} anneal"
    return Study(
        name=name,
        description=f"In small: {description}" if size.small else description,
        sources=SOURCES,
        ranks=size.ranks,
        sized_for="cpu" if size.small else "cuda",
        text=size.text,
        runs=tuple(runs),
        labels=labels,
        varied=Varied(
            name="peak learning rate",
            values={run.name: run.optimizer.peak_lr for run in runs},
            groups=groups,
        ),
        quantization=size.quantization,
        curvature=size.curvature,
        soups=(SoupSettings(name="soup-stable", steps=runs[0].save_steps[-5:]),),
        averaged_steps=tuple(sorted({*spread(0, start, size.averaged), *(run.total_steps for run in runs)})),
    )
