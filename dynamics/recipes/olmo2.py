"""The learning-rate ablation of OLMo2-7B, at its size and at 1B, 190M and 30M, and in small."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from curvature.settings import PlaneSettings, PredictionSettings
from dynamics.recipes import captions
from dynamics.recipes.web import (
    WEB_CRITICAL,
    WEB_CURVATURE,
    WEB_QUANTIZATION,
    WEB_SLICE,
    WEB_SPECS,
    WEB_STEP,
    web_text,
)
from study.axes import amount_name
from study.definition import Study
from study.design import with_controls
from study.measurements.quantization import QuantizationSettings
from study.measurements.tasks import TasksSettings
from study.recipes.parts import (
    DRAWS,
    SMALL_CRITICAL,
    SMALL_CURVATURE,
    SMALL_QUANTIZATION,
    SMALL_TEXT,
    annealed,
    data_of,
    lean,
    recipe,
    spread,
    study,
    sweep,
)
from study.soups import SoupSettings
from study.text_kinds import Text, TokenFile
from train.data.config import RepetitionFilter
from train.model.presets import OLMO2_1B, OLMO2_7B, OLMO2_30M, OLMO2_190M, olmo2
from train.optimizers.adamw import AdamW
from train.run.config import RunConfig
from train.run.optimization import CosinePhase, Lawa, ScheduleConfig
from train.run.saving import SavingConfig

SOURCES = (
    "the ablation: arXiv 2501.00656, section 4.1, figure 11, table 8",
    (
        "its settings: allenai/OLMo at aa3fd74b, configs/peteish7-google.yaml,"
        " scripts/augusta/peteish7-*-launch.sh; anneals of 50e9 tokens at 96924095"
    ),
    "architecture, optimizer, data: allenai/OLMo, configs/official-1124/OLMo2-7B-stage1.yaml",
    "models of 190M and 30M: allenai/OLMo-core at fa6c5014, src/olmo_core/nn/transformer/config.py",
    (
        "quantization: arXiv 2510.06213, section 5.1, figure 23, appendices A, D; "
        "aldakata/TrainingDynamicsQuantizationRobustness, gptqmodel_quantize.py"
    ),
    (
        "tokens before the anneal: 302e9, as Ai2's scripts have it; arXiv 2501.00656 has 300e9, and"
        " arXiv 2510.06213 250e9 in appendix E.4 and 300e9 in section 5.1 and the workshop version"
    ),
)
# Tokens of the 7B ablation. Ai2's scripts leave the long cosine at step 72,000 and count anneals in
# whole steps of 4,194,304 tokens; only the three higher rates have the long anneal. A smaller size
# divides every number of tokens, so that all go through the same shares of one schedule.
WARMUP_TOKENS = 2_000 * 4_194_304
ANNEALS_AT = 72_000 * 4_194_304
SHORT_ANNEAL, LONG_ANNEAL = 50e9, 100e9
HORIZON, SHORT_HORIZON = 5e12, 300e9
SMALL_DIVISOR = 1_536_000

TEXT = web_text(
    "allenai/OLMo-2-1124-7B",
    TokenFile(
        name="olmo-mix-1124",
        origin=(
            "python -m train index FILES --dtype uint32 --eos 100257, where FILES are"
            " OLMo-mix-1124's token files in the order of data.paths in allenai/OLMo,"
            " configs/official-1124/OLMo2-7B-stage1.yaml"
        ),
    ),
)
CURVATURE = WEB_CURVATURE.model_copy(update={"checkpointing": True})
STEP = WEB_STEP.model_copy(update={"checkpointing": True})
# Traces alone, which need no vector: by 'python -m curvature hutchinson --dry-run 8xh100' 60.1 GB
# of one GPU, 33.2 GB of its host, where the weights are while the guard moves them, and 1.6 s a
# product of 4,096 tokens. The vectors of the largest eigenvalue would take 617 GB.
TRACES = CURVATURE.model_copy(
    update={"lambda_max": False, "dtype": "bf16", "vectors": "host"}
    | {"pairs": 32, "companion_pairs": 8}
)


def run(
    name: str,
    peak_lr: float,
    *,
    divisor: int,
    text: Text,
    horizon: float = HORIZON,
    sequence_length: int = 4096,
    held_out_sequences: int = 256,
    batch_size: int,
    saves: int = 18,
    intervals: int = 144,
    **settings: Any,
) -> RunConfig:
    """Return a run up to where its anneals leave it; peaks, seed, order and filter are Ai2's.

    Every number of tokens of the 7B's is divided by `divisor`. It has `saves` checkpoints. It is
    evaluated and averages take in its weights at 144 `intervals`: 500 of 72,000 steps, as far as
    arXiv 2510.06213 has them apart (appendix C). `settings` are further ones of RunConfig.
    """
    tokens_per_step = batch_size * sequence_length
    # The anneals leave at this step; the run itself ends there.
    start = steps(ANNEALS_AT, divisor, tokens_per_step)
    save_steps = spread(0, start, saves)
    every = start // intervals
    defaults: dict[str, Any] = {
        "precision": "bf16",
        "saving": SavingConfig(asynchronous=True, restart_every_steps=500),
    }
    return RunConfig(
        name=name,
        seed=6198,
        data=data_of(
            text,
            sequence_length=sequence_length,
            held_out_sequences=held_out_sequences,
            order="olmo",
            repetition_filter=RepetitionFilter(),
        ),
        optimizer=AdamW(peak_lr=peak_lr),
        schedule=ScheduleConfig(
            warmup_tokens=round(WARMUP_TOKENS / divisor),
            phase=CosinePhase(horizon_tokens=round(horizon / divisor)),
        ),
        averages=(Lawa(interval_steps=every, window=5),),
        total_steps=save_steps[-1],
        batch_size=batch_size,
        save_steps=save_steps,
        evaluate_every_steps=every,
        **(defaults | settings),
    )


def steps(tokens: float, divisor: int, tokens_per_step: int) -> int:
    """Return the steps of a size that correspond to so many tokens of the 7B ablation."""
    return round(tokens / divisor / tokens_per_step)


def ablation(
    peaks: Sequence[float],
    of_runs: dict[str, Any],
    *,
    divisor: int,
    anneals: tuple[float, ...] = (SHORT_ANNEAL, LONG_ANNEAL),
    saves: int = 8,
    averaged: int = 3,
    text: Text = TEXT,
    **settings: Any,
) -> Study:
    """Return the study of runs at several peaks and of their anneals to zero.

    The run at the lowest of the rising peaks has the first anneal only. An anneal, of so many
    tokens at the 7B's size, has `saves` checkpoints: the error of quantization surges there.
    Averages are quantized at its end and after `averaged` parts of the run before it. `of_runs` are
    settings of `run`, `settings` further fields of Study.
    """
    parents = sweep(partial(run, divisor=divisor, text=text, **of_runs), peak_lr=peaks)
    runs: list[RunConfig] = []
    start = steps(ANNEALS_AT, divisor, parents[0].tokens_per_step)
    for parent in parents:
        runs.append(parent)
        # As in the ablation of Ai2: the long anneal is of the three higher rates only.
        for tokens in anneals if parent is not parents[0] else anneals[:1]:
            end = start + steps(tokens, divisor, parent.tokens_per_step)
            name = f"{parent.name}-anneal{amount_name((end - start) * parent.tokens_per_step)}"
            save_steps = spread(start, end, saves)
            runs.append(annealed(parent, name, start=start, save_steps=save_steps))
    # Ends of all runs, where averages are compared with annealed weights, and some before.
    averaged_steps = sorted({*spread(0, start, averaged), *(run.total_steps for run in runs)})
    defaults: dict[str, Any] = {"ranks": 8, "sized_for": "cuda", "quantization": WEB_QUANTIZATION}
    return study(
        lean(with_controls(runs), averaged_steps),
        text=text,
        sources=SOURCES,
        soups=(SoupSettings(name="soup-stable", steps=parents[0].save_steps[-5:]),),
        averaged_steps=tuple(averaged_steps),
        **(defaults | settings),
    )


def small(horizon: float = HORIZON, **settings: Any) -> Study:
    """Return the ablation at two peaks on a model of two layers, for the profile smoke."""
    model = olmo2(hidden_size=64, layers=2, heads=4, intermediate_size=192)
    of_runs = {
        "horizon": horizon,
        "sequence_length": 128,
        "held_out_sequences": 16,
        "batch_size": 16,
        "saves": 2,
        "intervals": 24,
        "model": model.model_copy(update={"vocab_size": SMALL_TEXT.vocab_size}),
        "micro_batch_size": 8,
        "precision": "fp32",
        "saving": SavingConfig(restart_every_steps=40),
    }
    return ablation(
        (3e-3, 1e-2),
        of_runs,
        divisor=SMALL_DIVISOR,
        saves=2,
        averaged=1,
        text=SMALL_TEXT,
        ranks=2,
        sized_for="cpu",
        quantization=SMALL_QUANTIZATION,
        curvature=SMALL_CURVATURE,
        critical=SMALL_CRITICAL,
        **settings,
    )


# 'python -m train plan RUN... --nodes N --gpus-per-node 8 --gpu h100' has the layouts. A rank of
# the 7B takes 73 GB on eight nodes and 98 GB on one: of an H200, or for H100s of 80 GB the planner
# splits it into two pipeline stages. On one node a rank of the 1B takes 44 GB, of the 190M 34 GB.
# Kernels are torch's, which need nothing installed; '--set kernels=transformer_engine' takes faster
# ones.
def _olmo2_7b(horizon: float, **settings: Any) -> Study:
    of_runs = {
        "horizon": horizon,
        "batch_size": 1024,
        "model": OLMO2_7B,
        "micro_batch_size": 1,
    }
    peaks = (3e-4, 6e-4, 9e-4, 1.2e-3)
    return ablation(peaks, of_runs, divisor=1, curvature=TRACES, critical=WEB_CRITICAL, **settings)


@recipe
def olmo2_7b_lr(*, smoke: bool = False) -> Study:
    """The OLMo2-7B learning-rate ablation: four near-constant rates to 302B tokens, seven anneals.

    As Ai2 ran it: a cosine towards 5e12 tokens left at 302e9, then anneals over 50e9 and 100e9
    tokens. The rate hardly falls before them, to 0.99234 of its peak. A branch reads on in the data
    of its parent, as Ai2's did. Peaks, batch, warm-up, seed, order and filter are Ai2's; where
    checkpoints are is this project's choice. Downstream tasks are those of arXiv 2510.06213.
    """
    if smoke:
        return small(captions=captions.of_peaks())
    drawn = {"dtype", "calibration_sequences"}
    tasks = TasksSettings(specs=WEB_SPECS, **WEB_QUANTIZATION.model_dump(include=drawn))
    return _olmo2_7b(HORIZON, tasks=tasks, captions=captions.of_peaks())


@recipe
def olmo2_7b_lr_cosine300b(*, smoke: bool = False) -> Study:
    """The same with cosines that fall to 10% of the peak at 300B tokens, before the anneals.

    So reads the workshop version of arXiv 2510.06213 ("300B tokens with cosine decay"), which is
    not what Ai2 ran.
    """
    make = small if smoke else _olmo2_7b
    return make(horizon=SHORT_HORIZON, captions=captions.COSINE_300B)


# A file of 10 billion tokens in 14 files: four times what a run of the 30M reads, without OLMo-mix
# to be indexed.
TEXT_30M = web_text(
    "allenai/OLMo-2-1124-7B",
    TokenFile(
        name="fineweb-edu-10bt-1",
        dataset="HuggingFaceFW/fineweb-edu",
        config="sample-10BT",
        files="1",
    ),
)


@recipe
def olmo2_1b_lr(*, smoke: bool = False) -> Study:
    """The learning-rate ablation with OLMo2-1B, a fifth of the tokens: 60B, anneals of 10B and 20B.

    That is 41 tokens per parameter, as the 7B's 302e9 are. The batch and the lowest peak are those
    of the released model (configs/official-0425/OLMo2-1B-stage1.yaml); the others are the multiples
    of the 7B's ablation.
    """
    in_small = captions.of_peaks("at a fifth of the tokens with 1B parameters")
    if smoke:
        return small(captions=in_small)
    return ablation(
        (4e-4, 8e-4, 1.2e-3, 1.6e-3),
        {"batch_size": 512, "model": OLMO2_1B, "micro_batch_size": 4},
        divisor=5,
        quantization=WEB_QUANTIZATION.model_copy(update={"by_block": WEB_SPECS}),
        curvature=CURVATURE.model_copy(update={"dtype": "bf16"}),
        step=STEP,
        slice=WEB_SLICE,
        captions=in_small,
        critical=WEB_CRITICAL,
    )


@recipe
def olmo2_190m_lr(*, smoke: bool = False) -> Study:
    """The learning-rate ablation with OLMo2-190M, a 25th of the tokens: 12B, anneals of 2B and 4B.

    The model is the 190M of OLMo-core's ladder. Its batch of 1,048,576 tokens and its peaks are
    this project's choice.
    """
    in_small = captions.of_peaks("at a 25th of the tokens with 190M parameters")
    if smoke:
        return small(captions=in_small)
    return ablation(
        (1e-3, 2e-3, 3e-3, 4e-3),
        {"batch_size": 256, "model": OLMO2_190M, "micro_batch_size": 16},
        divisor=25,
        quantization=WEB_QUANTIZATION.model_copy(update={"by_block": WEB_SPECS, "dtype": "fp32"}),
        curvature=CURVATURE,
        step=STEP,
        slice=WEB_SLICE,
        captions=in_small,
        critical=WEB_CRITICAL,
    )


@recipe
def olmo2_30m_lr(*, smoke: bool = False) -> Study:
    """The ablation with OLMo2-30M in an hour: 151M tokens, then 25M with an anneal and without.

    The 30M of OLMo-core's ladder and a 2,000th of every number of tokens: an hour of one H100. The
    30M counts no token embedding: with it there are 55M weights, of which the quantized blocks hold
    3.4M. Peaks, batch, context, text and what is measured are this project's choice, made for the
    hour: less text and fewer methods than the larger sizes.
    """
    in_small = captions.of_peaks("at a 2,000th of the tokens with 30M parameters")
    if smoke:
        return small(captions=in_small, anneals=(SHORT_ANNEAL,))
    of_runs = {
        "sequence_length": 2048,
        "held_out_sequences": 64,
        "batch_size": 64,
        "saves": 4,
        "model": OLMO2_30M,
        "micro_batch_size": 8,
    }
    fewer = {"pairs": 32, "norm_pairs": 8, "companion_pairs": 16, "fixed_sequences": 4}
    return ablation(
        (1e-3, 2e-3, 4e-3, 8e-3),
        of_runs,
        divisor=2_000,
        anneals=(SHORT_ANNEAL,),
        saves=2,
        averaged=1,
        text=TEXT_30M,
        ranks=1,
        quantization=QuantizationSettings(
            specs=WEB_SPECS,
            methods=("gptqmodel-b3-g128-paper", "rtn-b3-g128", "awq-b3-g128"),
            by_block=WEB_SPECS,
            calibration_sequences=128,
            calibration_seeds=DRAWS,
            eval_tokens=131_072,
            block_tokens=32_768,
        ),
        curvature=WEB_CURVATURE.model_copy(update=fewer),
        step=PredictionSettings(microbatches=16, microbatch_sequences=1),
        slice=PlaneSettings(grid=11, sequences=8),
        captions=in_small,
        critical=WEB_CRITICAL.model_copy(update={"sequences": 8, "batch_size": 8}),
    )
