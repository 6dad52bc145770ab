"""The learning-rate ablation of OLMo2: as it was run, at sizes that fewer GPUs can afford, and in small."""

from dataclasses import dataclass
from typing import Literal

from study.recipes.parts import (
    EVAL_TOKENS,
    SMALL_CURVATURE,
    SMALL_QUANTIZATION,
    SMALL_TEXT,
    SMOKE,
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
from train.models import OLMO2_1B, OLMO2_7B, OLMO2_190M, olmo2
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
CURVATURE = CurvatureSettings(
    pairs=64,
    norm_pairs=16,
    companion_pairs=32,
    microbatch_sequences=1,
    fixed_sequences=16,
    tolerance=1e-2,
    step_microbatches=32,
    slice_grid=15,
    slice_sequences=32,
    checkpointing=True,
)


@dataclass(frozen=True)
class _Size:
    """What differs between the sizes of the ablation.

    Attributes:
        divisor: of every number of tokens, so that all sizes go through the same shares of one schedule.
        peaks: learning rates, the lowest first.
        parent_saves: checkpoints of a run up to its anneals, evenly spaced.
        anneal_saves: checkpoints of an anneal: the error of quantization surges there.
        intervals: parts of the run up to its anneals after which it is evaluated and averages take in its weights: 144
            are 500 of 72,000 steps, as far as arXiv 2510.06213 has them apart (appendix C).
        averaged: parts of the run up to its anneals after which averages are quantized.
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
    ranks: int = 8
    precision: Literal["fp32", "bf16"] = "bf16"
    parallel: ParallelConfig = UNSPLIT
    saving: SavingConfig = SAVING

    def steps(self, tokens: float) -> int:
        """Steps of this size that stand for so many tokens of the 7B ablation."""
        return round(tokens / self.divisor / (self.batch_size * self.sequence_length))


# On H100 with 80 GB, 'python -m train plan RUN... --nodes N --gpus-per-node 8 --gpu h100' has a rank of the 7B at 75 GB
# on one node and 50 GB on eight, of the 1B at 50 GB and of the 190M at 41 GB on one. Kernels are torch's, which need
# nothing installed; '--set kernels=transformer_engine' takes faster ones.
#
# Curvature, by 'python -m curvature run --dry-run --gpu h100': the 54 vectors behind the largest eigenvalue take 58 GB
# of a GPU for the 190M, 321 GB for the 1B, which 8 GPUs share (53 GB each), and 1.6 TB for the 7B: not measured.
SIZE_7B = _Size(
    model=OLMO2_7B,
    divisor=1,
    batch_size=1024,
    peaks=(3e-4, 6e-4, 9e-4, 1.2e-3),
    micro_batch_size=1,
    parallel=ParallelConfig(tensor=2, sequence=True),
    curvature=None,
)
SIZE_1B = _Size(
    model=OLMO2_1B,
    divisor=5,
    batch_size=512,
    peaks=(4e-4, 8e-4, 1.2e-3, 1.6e-3),
    micro_batch_size=2,
    quantization=QUANTIZATION.model_copy(update={"by_block": WEB_SPECS}),
    curvature=CURVATURE.model_copy(update={"dtype": "bf16", "sharding": "fsdp"}),
)
SIZE_190M = _Size(
    model=OLMO2_190M,
    divisor=25,
    batch_size=256,
    peaks=(1e-3, 2e-3, 3e-3, 4e-3),
    micro_batch_size=4,
    quantization=QUANTIZATION.model_copy(update={"by_block": WEB_SPECS, "dtype": "fp32"}),
    curvature=CURVATURE,
)
SMALL = _Size(
    model=olmo2(hidden_size=64, layers=2, heads=4, intermediate_size=192).model_copy(
        update={"vocab_size": SMALL_TEXT.vocab_size}
    ),
    divisor=1_536_000,
    batch_size=16,
    peaks=(3e-3, 1e-2),
    micro_batch_size=8,
    quantization=SMALL_QUANTIZATION,
    curvature=SMALL_CURVATURE,
    text=SMALL_TEXT,
    sequence_length=128,
    held_out_sequences=16,
    parent_saves=2,
    anneal_saves=2,
    intervals=24,
    averaged=1,
    ranks=2,
    precision="fp32",
    saving=SavingConfig(),
)


def _parent(size: _Size, peak_lr: float, horizon: float) -> RunConfig:
    end, every = size.steps(ANNEALS_AT), size.steps(ANNEALS_AT) // size.intervals
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
        total_steps=end,
        batch_size=size.batch_size,
        micro_batch_size=size.micro_batch_size,
        save_steps=spread(0, end, size.parent_saves),
        evaluate_every_steps=every,
    )


def _ablation(name: str, size: _Size, description: str, horizon: float = HORIZON) -> Study:
    """Per peak a run up to the anneals and its anneals to zero, long ones for all peaks but the lowest."""
    runs, labels, groups, start = [], {}, {}, size.steps(ANNEALS_AT)
    for peak_lr in size.peaks:
        parent = _parent(size, peak_lr, horizon)
        runs.append(parent)
        labels[parent.name], groups[parent.name] = f"{peak_lr:g}", "no anneal"
        for tokens in (SHORT_ANNEAL, LONG_ANNEAL) if peak_lr > size.peaks[0] else (SHORT_ANNEAL,):
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
        description=f"In small: {description}" if size is SMALL else description,
        sources=SOURCES,
        ranks=size.ranks,
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


def olmo2_7b_lr(smoke: bool = False) -> Study:
    """As Ai2 ran it: a cosine towards 5e12 tokens left at 302e9, then seven anneals over 50e9 and 100e9 tokens.

    The rate hardly falls before them, to 0.99234 of its peak. A branch goes on with the data of its parent, as Ai2's
    did. Peaks, batch, warm-up, seed, order and filter are Ai2's; where checkpoints lie is this project's choice.
    """
    return _ablation(
        f"olmo2-7b-lr{SMOKE * smoke}",
        SMALL if smoke else SIZE_7B,
        "The OLMo2-7B learning-rate ablation: four near-constant rates to 302B tokens, seven anneals of 50B and 100B",
    )


def olmo2_7b_lr_cosine300b(smoke: bool = False) -> Study:
    """The same, but for the cosine, which has fallen to 10% of the peak at 300e9 tokens.

    So reads the workshop version of arXiv 2510.06213 ("300B tokens with cosine decay"), which is not what Ai2 ran.
    """
    return _ablation(
        f"olmo2-7b-lr-cosine300b{SMOKE * smoke}",
        SMALL if smoke else SIZE_7B,
        "The same with cosines that fall to 10% of the peak at 300B tokens, before the anneals",
        SHORT_HORIZON,
    )


def olmo2_1b_lr(smoke: bool = False) -> Study:
    """The ablation with OLMo2-1B and a fifth of every number of tokens: 41 tokens per parameter, as the 7B's 302e9 are.

    The batch and the lowest peak are those of the released model (configs/official-0425/OLMo2-1B-stage1.yaml); the
    others are the multiples of the 7B's ablation.
    """
    return _ablation(
        f"olmo2-1b-lr{SMOKE * smoke}",
        SMALL if smoke else SIZE_1B,
        "The learning-rate ablation with OLMo2-1B, a fifth of the tokens: 60B, anneals of 10B and 20B",
    )


def olmo2_190m_lr(smoke: bool = False) -> Study:
    """The ablation with the 190M of OLMo-core's ladder and a 25th of every number of tokens.

    Its batch of 1,048,576 tokens and its peaks are this project's choice.
    """
    return _ablation(
        f"olmo2-190m-lr{SMOKE * smoke}",
        SMALL if smoke else SIZE_190M,
        "The learning-rate ablation with OLMo2-190M, a 25th of the tokens: 12B, anneals of 2B and 4B",
    )
