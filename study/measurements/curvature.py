"""The Hessian of the held-out loss at every checkpoint: traces, and the top eigenvalue."""

from collections.abc import Mapping

from pydantic import BaseModel, Field

from ckpt_tools.hf.measured import Curvature
from curvature.settings import HutchinsonSettings, TraceSettings
from study.measurements.kind import (
    CURVED,
    SHARE,
    Column,
    Kind,
    Subject,
    TabledResult,
    alone,
    estimated,
    options,
)
from study.paths import curvature_result
from study.step import Step

TRACE = Column("curvature/trace", "trace", CURVED)
RELATIVE = Column("curvature/relative_trace", "relative trace")
TOP = Column("curvature/lambda_max", "largest eigenvalue", CURVED)
RESIDUAL = Column("curvature/lambda_max_residual", "relative residual of the solver", SHARE)
CONVERGED = Column("curvature/lambda_max_converged", "whether the solver converged", type="flag")
ITERATIONS = Column("curvature/lambda_max_iterations", "iterations of the solver", type="count")
PROBES = Column("curvature/trace_probes", "pairs of a probe and a microbatch", type="count")
LOSS = Column("curvature/loss", "loss over the same sequences")
TRACES = (
    TRACE,
    Column("curvature/gauss_newton_trace", "trace of the Gauss-Newton matrix"),
    Column("curvature/fisher_trace", "trace of the Fisher matrix"),
    RELATIVE,
)
COLUMNS = (*TRACES, LOSS, PROBES, TOP, RESIDUAL, CONVERGED, ITERATIONS)
READINGS = [
    *(reading for trace in TRACES for reading in estimated(trace, trace.name, trace.figure)),
    alone(LOSS, LOSS.name, "loss"),
    alone(PROBES, PROBES.name, "trace", "probes"),
    alone(TOP, TOP.name, "lambda_max", "value"),
    alone(RESIDUAL, RESIDUAL.name, "lambda_max", "residual"),
    alone(CONVERGED, CONVERGED.name, "lambda_max", "converged"),
    alone(ITERATIONS, ITERATIONS.name, "lambda_max", "iterations"),
]


class CurvatureSettings(TraceSettings):
    """Hessian of the held-out loss at every checkpoint: traces, and the top eigenvalue."""

    averages: bool = Field(default=False, description="of averages of weights too")


def product_options(
    command: type[BaseModel], settings: BaseModel, subject: Subject
) -> tuple[str, ...]:
    """Return the options of a command with Hessian products, over the held-out text."""
    chosen = options(command, settings, device="{device}", sharding="{sharding}")
    return ("--data", subject.texts["held_out"].prefix, *chosen)


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
            tail=product_options(HutchinsonSettings, settings, subject),
            expected_seconds=3.0,
        )
    ]


CURVATURE = Kind[CurvatureSettings](
    "curvature",
    "weights",
    _steps,
    lambda _: [TabledResult("curvature", "hutchinson", Curvature, READINGS)],
    averages=lambda settings: settings.averages,
    shares_work=True,
    shares_model=True,
)
