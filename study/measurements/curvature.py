"""The Hessian of the held-out loss at every checkpoint: traces, and the top eigenvalue."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from base.frozen import Frozen, field_of
from ckpt_tools.hf.measured import Curvature
from curvature.settings import Count, HutchinsonSettings
from study.measurements.kind import Column, Kind, Result, Subject, estimated
from study.paths import curvature_result
from study.pipeline.step import Step

# The figures that others read, as columns of the table.
TRACE, TOP = "curvature/trace", "curvature/lambda_max"
RELATIVE = "curvature/relative_trace"

TRACES = ("trace", "gauss_newton_trace", "fisher_trace", "relative_trace")
COLUMNS = [
    *(column for trace in TRACES for column in estimated(f"curvature/{trace}", trace)),
    Column("curvature/loss", ("loss",)),
    Column("curvature/trace_probes", ("trace", "probes"), "count"),
    Column(TOP, ("lambda_max", "value")),
    Column("curvature/lambda_max_residual", ("lambda_max", "residual")),
    Column("curvature/lambda_max_converged", ("lambda_max", "converged"), "flag"),
    Column("curvature/lambda_max_iterations", ("lambda_max", "iterations"), "count"),
]


class CurvatureSettings(Frozen):
    """Hessian of the held-out loss at every checkpoint: traces, and the top eigenvalue by Lanczos.

    At the last checkpoint of each run also along the steps of `QuantizationSettings.by_block`, and
    the loss on a plane. Defaults are those of the command.
    """

    pairs: int = Field(ge=2, description="(probe, microbatch) pairs of the trace")
    norm_pairs: int = Field(ge=2, description="pairs whose probes are restricted to the norms")
    companion_pairs: int = Field(
        ge=2, description="microbatches of the Gauss-Newton and Fisher traces"
    )
    microbatch_sequences: int = Field(ge=1)
    averages: bool = Field(default=False, description="of averages of weights too")
    lambda_max: bool = field_of(HutchinsonSettings, "lambda_max")
    fixed_sequences: int = field_of(HutchinsonSettings, "fixed_sequences")
    tolerance: float = field_of(HutchinsonSettings, "tolerance")
    max_iterations: int = field_of(HutchinsonSettings, "max_iterations")
    sequence_length: Count | None = field_of(HutchinsonSettings, "sequence_length")
    step_microbatches: int = Field(ge=2, description="for every figure of a quantization step")
    slice_grid: int = Field(ge=3, description="points along either axis of a slice")
    slice_sequences: int = Field(ge=2, description="sequences of every loss of a slice")
    dtype: Literal["fp32", "bf16"] = field_of(HutchinsonSettings, "dtype")
    vectors: Literal["device", "host"] = field_of(HutchinsonSettings, "vectors")
    checkpointing: bool = field_of(HutchinsonSettings, "checkpointing")


def product_options(settings: CurvatureSettings) -> tuple[str, ...]:
    """Return what a Hessian product is over, and how that of a large model fits."""
    options: tuple[str, ...] = ("--microbatch-sequences", str(settings.microbatch_sequences))
    if settings.sequence_length:
        options += ("--sequence-length", str(settings.sequence_length))
    options += ("--sharding", "{sharding}", "--vectors", settings.vectors)
    return (*options, "--checkpointing") if settings.checkpointing else options


def _steps(
    settings: CurvatureSettings, subject: Subject, _: Mapping[str, list[Step]]
) -> list[Step]:
    eigenvalue: tuple[str, ...] = ("--no-lambda-max",)
    if settings.lambda_max:
        eigenvalue = (
            *("--fixed-sequences", str(settings.fixed_sequences)),
            *("--tolerance", f"{settings.tolerance:g}"),
            *("--max-iterations", str(settings.max_iterations)),
        )
    options = (
        *("--data", subject.texts["held_out"].prefix),
        *("--pairs", str(settings.pairs), "--norm-pairs", str(settings.norm_pairs)),
        *("--companion-pairs", str(settings.companion_pairs)),
        *eigenvalue,
        *("--dtype", settings.dtype, *product_options(settings), "--device", "{device}"),
    )
    return [
        subject.step(
            "curvature",
            f"curvature-{subject.run}-{subject.name}",
            ("{launch}", "-m", "curvature", "hutchinson"),
            (curvature_result(subject.run, subject.model),),
            uses=("held_out",),
            models=(subject.hf,),
            tail=options,
        )
    ]


CURVATURE = Kind[CurvatureSettings](
    "curvature",
    "weights",
    _steps,
    lambda _: [Result("curvature", "hutchinson", Curvature, COLUMNS)],
    averages=lambda settings: settings.averages,
    shares_work=True,
    shares_model=True,
)
