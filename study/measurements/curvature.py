"""The Hessian of the held-out loss at every checkpoint: traces, and the top eigenvalue."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from base.frozen import Frozen
from ckpt_tools.hf.measured import Curvature
from ckpt_tools.hf.results import read_result
from study.measurements.kind import (
    ESTIMATE,
    Kind,
    Reader,
    Subject,
    Type,
    Values,
    estimate_values,
)
from study.paths import MeasuredModel, curvature_result
from study.pipeline.step import Step

TRACES = ("trace", "gauss_newton_trace", "fisher_trace")
EIGENVALUE: dict[str, Type] = {"value": "number", "residual": "number"}
EIGENVALUE |= {"converged": "flag", "iterations": "count"}


class CurvatureSettings(Frozen):
    """Hessian of the held-out loss at every checkpoint: traces, and the top eigenvalue by Lanczos.

    At the last checkpoint of each run also along the steps of `QuantizationSettings.by_block`, and
    the loss on a plane.
    """

    pairs: int = Field(ge=2, description="(probe, microbatch) pairs of the trace")
    norm_pairs: int = Field(ge=2, description="pairs whose probes are restricted to the norms")
    companion_pairs: int = Field(
        ge=2, description="microbatches of the Gauss-Newton and Fisher traces"
    )
    microbatch_sequences: int = Field(ge=1)
    lambda_max: bool = Field(
        default=True, description="whether the top eigenvalue is measured; it takes vectors"
    )
    fixed_sequences: int = Field(
        default=16, ge=1, description="sequences of the fixed batch of the eigenvalue"
    )
    tolerance: float = Field(
        default=1e-2, gt=0, description="relative residual that counts as converged"
    )
    max_iterations: int = Field(
        default=16, ge=2, description="iterations to the eigenvalue, of a vector each, at most"
    )
    sequence_length: int | None = Field(
        default=None, ge=1, description="tokens; None: the model's context"
    )
    step_microbatches: int = Field(ge=2, description="for every figure of a quantization step")
    slice_grid: int = Field(ge=3, description="points along either axis of a slice")
    slice_sequences: int = Field(ge=2, description="sequences of every loss of a slice")
    dtype: Literal["fp32", "bf16"] = Field(default="fp32", description="of the products' matrices")
    vectors: Literal["device", "host"] = Field(
        default="device", description="where vectors over all weights are kept"
    )
    checkpointing: bool = Field(
        default=False, description="keep only the blocks' inputs: slower, far less memory"
    )


def product_options(settings: CurvatureSettings) -> tuple[str, ...]:
    """Return what a Hessian product is over, and how that of a large model fits."""
    options: tuple[str, ...] = ("--microbatch-sequences", str(settings.microbatch_sequences))
    if settings.sequence_length:
        options += ("--sequence-length", str(settings.sequence_length))
    options += ("--sharding", "{sharding}", "--vectors", settings.vectors)
    return (*options, "--checkpointing") if settings.checkpointing else options


def _options(settings: CurvatureSettings, subject: Subject) -> tuple[str, ...]:
    options: tuple[str, ...] = ("--data", subject.texts["held_out"].prefix)
    options += ("--pairs", str(settings.pairs), "--norm-pairs", str(settings.norm_pairs))
    options += ("--companion-pairs", str(settings.companion_pairs))
    if settings.lambda_max:
        options += ("--fixed-sequences", str(settings.fixed_sequences))
        options += ("--tolerance", f"{settings.tolerance:g}")
        options += ("--max-iterations", str(settings.max_iterations))
    else:
        options += ("--no-lambda-max",)
    options += ("--dtype", settings.dtype, *product_options(settings))
    return (*options, "--device", "{device}")


def _steps(
    settings: CurvatureSettings, subject: Subject, _: Mapping[str, list[Step]]
) -> list[Step]:
    return [
        subject.step(
            "curvature",
            f"curvature-{subject.run}-{subject.name}",
            ("{launch}", "-m", "curvature", "hutchinson"),
            (curvature_result(subject.run, subject.model),),
            uses=("held_out",),
            models=(subject.hf,),
            tail=_options(settings, subject),
        )
    ]


def _columns(_: CurvatureSettings) -> dict[str, Type]:
    columns: dict[str, Type] = {
        f"curvature/{trace}{suffix}": "number" for trace in TRACES for suffix in ESTIMATE
    }
    columns |= {"curvature/loss": "number", "curvature/trace_probes": "count"}
    return columns | {_eigenvalue_column(figure): kind for figure, kind in EIGENVALUE.items()}


def _eigenvalue_column(figure: str) -> str:
    return "curvature/lambda_max" + ("" if figure == "value" else f"_{figure}")


def _values(path: Path) -> Values:
    measured, values = read_result(path, Curvature).measured, Values()
    for trace in TRACES:
        values |= estimate_values(f"curvature/{trace}", getattr(measured, trace))
    values["curvature/loss"] = measured.loss
    values["curvature/trace_probes"] = measured.trace.probes if measured.trace else None
    top = measured.lambda_max  # None where it was not asked for
    return values | {
        _eigenvalue_column(figure): getattr(top, figure) if top else None for figure in EIGENVALUE
    }


def _results(_: CurvatureSettings, run: str, model: MeasuredModel) -> dict[str, Reader]:
    return {curvature_result(run, model): _values}


CURVATURE = Kind[CurvatureSettings](
    "curvature", "weights", _steps, _results, _columns, shares_work=True, shares_model=True
)
