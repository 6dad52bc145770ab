"""The learning-rate ablation of OLMo2 at smaller sizes than the 7B of `dynamics.recipes.olmo2`."""

from dynamics.recipes.olmo2 import CURVATURE, SHORT_ANNEAL, ablation, small
from dynamics.recipes.parts import WEB_CURVATURE, WEB_QUANTIZATION, WEB_SPECS, recipe, web_text
from study.definition import Study
from study.measurements.quantization import QuantizationSettings
from study.text.kinds import TokenFile
from train.model.presets import OLMO2_1B, OLMO2_30M, OLMO2_190M

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
    if smoke:
        return small()
    return ablation(
        (4e-4, 8e-4, 1.2e-3, 1.6e-3),
        {"batch_size": 512, "model": OLMO2_1B, "micro_batch_size": 4},
        divisor=5,
        quantization=WEB_QUANTIZATION.model_copy(update={"by_block": WEB_SPECS}),
        curvature=CURVATURE.model_copy(update={"dtype": "bf16"}),
    )


@recipe
def olmo2_190m_lr(*, smoke: bool = False) -> Study:
    """The learning-rate ablation with OLMo2-190M, a 25th of the tokens: 12B, anneals of 2B and 4B.

    The model is the 190M of OLMo-core's ladder. Its batch of 1,048,576 tokens and its peaks are
    this project's choice.
    """
    if smoke:
        return small()
    return ablation(
        (1e-3, 2e-3, 3e-3, 4e-3),
        {"batch_size": 256, "model": OLMO2_190M, "micro_batch_size": 16},
        divisor=25,
        quantization=WEB_QUANTIZATION.model_copy(update={"by_block": WEB_SPECS, "dtype": "fp32"}),
        curvature=CURVATURE,
    )


@recipe
def olmo2_30m_lr(*, smoke: bool = False) -> Study:
    """The ablation with OLMo2-30M in an hour: 151M tokens, then 25M with an anneal and without.

    The 30M of OLMo-core's ladder and a 2,000th of every number of tokens: an hour of one H100. The
    30M counts no token embedding: with it there are 55M weights, of which the quantized blocks hold
    3.4M. Peaks, batch, context, text and what is measured are this project's choice, made for the
    hour: less text and fewer methods than the larger sizes.
    """
    if smoke:
        return small(anneals=(SHORT_ANNEAL,))
    of_runs = {
        "sequence_length": 2048,
        "held_out_sequences": 64,
        "batch_size": 64,
        "saves": 4,
        "model": OLMO2_30M,
        "micro_batch_size": 8,
    }
    measured = {
        "pairs": 32,
        "norm_pairs": 8,
        "companion_pairs": 16,
        "fixed_sequences": 4,
        "step_microbatches": 16,
        "slice_grid": 11,
        "slice_sequences": 8,
    }
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
            eval_tokens=131_072,
            block_tokens=32_768,
        ),
        curvature=WEB_CURVATURE.model_copy(update=measured),
    )
