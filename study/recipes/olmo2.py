"""The learning-rate ablation of OLMo2: as it was run, at sizes that fewer GPUs can afford, and in small."""

from dataclasses import replace

from study.recipes.olmo2_runs import QUANTIZATION, SHORT_ANNEAL, SHORT_HORIZON, Size, ablation
from study.recipes.parts import SMALL_CURVATURE, SMALL_QUANTIZATION, SMALL_TEXT, SMOKE, WEB_SPECS, web_text
from study.settings import CurvatureSettings, QuantizationSettings, Study
from study.text import TokenFile
from train.models import OLMO2_1B, OLMO2_7B, OLMO2_30M, OLMO2_190M, olmo2
from train.settings import ParallelConfig, SavingConfig

# A file of 10 billion tokens in 14 files: four times what a run of the 30M reads, without OLMo-mix to be indexed.
TEXT_30M = web_text(
    "allenai/OLMo-2-1124-7B",
    TokenFile(name="fineweb-edu-10bt-1", dataset="HuggingFaceFW/fineweb-edu", config="sample-10BT", files="1"),
)
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
# Traces alone, which take no vector: 4.5 minutes of an H100 a checkpoint by the dry run, which has a product of 4,096
# tokens at 3.6 s, 19% of the peak. The weights themselves lie on the host while the guard moves them.
TRACES = CURVATURE.model_copy(
    update={"lambda_max": False, "dtype": "bf16", "vectors": "host", "pairs": 32, "companion_pairs": 8}
)


# On H100 with 80 GB, 'python -m train plan RUN... --nodes N --gpus-per-node 8 --gpu h100' has a rank of the 7B at 75 GB
# on one node and 50 GB on eight, of the 1B at 50 GB and of the 190M at 41 GB on one. Kernels are torch's, which need
# nothing installed; '--set kernels=transformer_engine' takes faster ones.
#
# Curvature, by 'python -m curvature run --dry-run --gpu h100': the vectors behind the largest eigenvalue, 21 at most,
# take 22 GB of a GPU for the 190M, 125 GB for the 1B, which two GPUs share, and 613 GB for the 7B, of which traces
# alone are measured: 66 GB of a GPU and 33 GB of its host.
SIZE_7B = Size(
    model=OLMO2_7B,
    divisor=1,
    batch_size=1024,
    peaks=(3e-4, 6e-4, 9e-4, 1.2e-3),
    micro_batch_size=1,
    parallel=ParallelConfig(tensor=2, sequence=True),
    curvature=TRACES,
)
SIZE_1B = Size(
    model=OLMO2_1B,
    divisor=5,
    batch_size=512,
    peaks=(4e-4, 8e-4, 1.2e-3, 1.6e-3),
    micro_batch_size=2,
    quantization=QUANTIZATION.model_copy(update={"by_block": WEB_SPECS}),
    curvature=CURVATURE.model_copy(update={"dtype": "bf16"}),
)
SIZE_190M = Size(
    model=OLMO2_190M,
    divisor=25,
    batch_size=256,
    peaks=(1e-3, 2e-3, 3e-3, 4e-3),
    micro_batch_size=4,
    quantization=QUANTIZATION.model_copy(update={"by_block": WEB_SPECS, "dtype": "fp32"}),
    curvature=CURVATURE,
)
# Measured in an hour too: less text and fewer methods than the larger sizes, contexts of 2,048 tokens.
SIZE_30M = Size(
    model=OLMO2_30M,
    divisor=2_000,
    batch_size=64,
    peaks=(1e-3, 2e-3, 4e-3, 8e-3),
    micro_batch_size=8,
    quantization=QuantizationSettings(
        specs=WEB_SPECS,
        methods=("gptqmodel-b3-g128-paper", "rtn-b3-g128", "awq-b3-g128"),
        by_block=WEB_SPECS,
        calibration_sequences=128,
        eval_tokens=131_072,
        block_tokens=32_768,
    ),
    curvature=CURVATURE.model_copy(
        update={
            "pairs": 32,
            "norm_pairs": 8,
            "companion_pairs": 16,
            "fixed_sequences": 4,
            "step_microbatches": 16,
            "slice_grid": 11,
            "slice_sequences": 8,
            "checkpointing": False,
        }
    ),
    text=TEXT_30M,
    sequence_length=2048,
    held_out_sequences=64,
    parent_saves=4,
    anneal_saves=2,
    averaged=1,
    anneals=(SHORT_ANNEAL,),
    controlled=True,
    ranks=1,
)
SMALL = Size(
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
    small=True,
)


def olmo2_7b_lr(smoke: bool = False) -> Study:
    """As Ai2 ran it: a cosine towards 5e12 tokens left at 302e9, then seven anneals over 50e9 and 100e9 tokens.

    The rate hardly falls before them, to 0.99234 of its peak. A branch goes on with the data of its parent, as Ai2's
    did. Peaks, batch, warm-up, seed, order and filter are Ai2's; where checkpoints lie is this project's choice.
    """
    return ablation(
        f"olmo2-7b-lr{SMOKE * smoke}",
        SMALL if smoke else SIZE_7B,
        "The OLMo2-7B learning-rate ablation: four near-constant rates to 302B tokens, seven anneals of 50B and 100B",
    )


def olmo2_7b_lr_cosine300b(smoke: bool = False) -> Study:
    """The same, but for the cosine, which has fallen to 10% of the peak at 300e9 tokens.

    So reads the workshop version of arXiv 2510.06213 ("300B tokens with cosine decay"), which is not what Ai2 ran.
    """
    return ablation(
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
    return ablation(
        f"olmo2-1b-lr{SMOKE * smoke}",
        SMALL if smoke else SIZE_1B,
        "The learning-rate ablation with OLMo2-1B, a fifth of the tokens: 60B, anneals of 10B and 20B",
    )


def olmo2_190m_lr(smoke: bool = False) -> Study:
    """The ablation with the 190M of OLMo-core's ladder and a 25th of every number of tokens.

    Its batch of 1,048,576 tokens and its peaks are this project's choice.
    """
    return ablation(
        f"olmo2-190m-lr{SMOKE * smoke}",
        SMALL if smoke else SIZE_190M,
        "The learning-rate ablation with OLMo2-190M, a 25th of the tokens: 12B, anneals of 2B and 4B",
    )


def olmo2_30m_lr(smoke: bool = False) -> Study:
    """The ablation with the 30M of OLMo-core's ladder and a 2,000th of every number of tokens: an hour of one H100.

    Its parents train on without an anneal to where their anneals end: controls of equal tokens. The 30M counts no token
    embedding: with it there are 55M weights, of which the quantized blocks hold 3.4M. Peaks, batch, context, text and
    what is measured are this project's choice, made for the hour (`study.recipes.cost`).
    """
    return ablation(
        f"olmo2-30m-lr{SMOKE * smoke}",
        replace(SMALL, anneals=(SHORT_ANNEAL,), controlled=True) if smoke else SIZE_30M,
        "The learning-rate ablation with OLMo2-30M in an hour: 151M tokens, anneals of 25M and controls without",
    )
