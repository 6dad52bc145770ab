"""Texts, methods and curvature of arXiv 2510.06213, which the recipes measure by."""

from curvature.settings import LineSettings, PlaneSettings, PredictionSettings
from study.measurements.curvature import CurvatureSettings
from study.measurements.quantization import QuantizationSettings
from study.recipes.parts import DRAWS
from study.text_kinds import PreparedText, TokenFile

# arXiv 2510.06213, appendices A and D: calibrated on C4's second file, c4-train.00001-of-01024, and
# measured on some 600,000 tokens of RefinedWeb, of which
# aldakata/TrainingDynamicsQuantizationRobustness does not say which.
C4 = TokenFile(name="c4", dataset="allenai/c4", config="en", files="2")
REFINEDWEB = TokenFile(
    name="refinedweb", dataset="tiiuae/falcon-refinedweb", files="1", key="content"
)
WEB_SPECS = ("gptq-b3-g128", "gptq-b4-g128")
# At the end of training, of each kind that arXiv 2510.06213 names; -paper is what it ran.
WEB_METHODS = (
    *("gptqmodel-b3-g128-paper", "gptqmodel-b4-g128-paper", "rtn-b3-g128", "rtn-b4-g128"),
    *("awq-b3-g128", "awq-b4-g128", "autoround-b3-g128", "nf4-g64", "int8-t6"),
    # weights alone: rotated, in codebooks, in three levels
    *("gptq-b3-g128-had", "gptq-b4-g128-had", "qtip-b2", "qtip-b3", "ternary-g128"),
    # weights and activations: formats of engines, and 4 bits by every transform
    *("w8a8", "w8a8-smooth0.5", "fp8", "mxfp4", "gptq-nvfp4"),
    *("w4a4-g128", "w4a4-g128-baseq-quarot", "w4a4-g128-duquant"),
    *("w4a4-g128-spinquant-blockwise", "w4a4-g128-ostquant-blockwise"),
    *("w4a4-g128-flatquant-blockwise", "gptq-b4-g128-a4-kv4-quarot"),
    *("atom-b4-g128-keep0.03-a4", "quik-b4-perchannel-keep0.06-a4"),
    *("kv4", "kv4-quarot"),
)
WEB_QUANTIZATION = QuantizationSettings(
    specs=WEB_SPECS,
    methods=WEB_METHODS,
    along=("w4a4-g128-quarot", "nvfp4"),
    calibration_sequences=256,
    calibration_seeds=DRAWS,
    eval_tokens=600_000,
    block_tokens=150_000,
    dtype="bf16",
)
WEB_CURVATURE = CurvatureSettings(
    pairs=64,
    norm_pairs=16,
    companion_pairs=32,
    microbatch_sequences=1,
    fixed_sequences=16,
)
WEB_STEP = PredictionSettings(microbatches=32, microbatch_sequences=1)
WEB_SLICE = PlaneSettings(grid=15, sequences=32)
WEB_CRITICAL = LineSettings(sequences=16)  # that many as the batch of the eigenvalue


def web_text(tokenizer: str, train: TokenFile | None = None) -> PreparedText:
    """Return the paper's texts to calibrate on and to measure on, with the tokens of a tokenizer.

    The name of each file says whose tokens it holds.
    """

    def tokenized(file: TokenFile) -> TokenFile:
        # A slash in the name of a repository would be a folder.
        return file.model_copy(update={"name": f"{file.name}--{tokenizer.replace('/', '--')}"})

    return PreparedText(
        tokenizer=tokenizer,
        train=tokenized(train) if train else None,
        held_out=tokenized(REFINEDWEB),
        calibration=tokenized(C4),
    )
