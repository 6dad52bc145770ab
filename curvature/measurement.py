"""Curvature of one model: from an HF directory and settings to the content of result.json."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from base.ranks import Ranks
from curvature.cost.memory import check_room
from curvature.settings import CurvatureSettings, HutchinsonSettings
from curvature.spectrum.fixed_batch import measure_spectrum, measure_top
from curvature.subject import open_model
from curvature.trace.estimates import TRACE_UNIT
from curvature.trace.hutchinson import measure_traces

UNITS = {
    "loss": "nats per token",
    "trace, block_traces, tensor_traces, norm_traces, gauss_newton_trace, fisher_trace": TRACE_UNIT,
    "relative_trace": "nats per token",
    "lambda_max.value, eigenvalues, density.nodes": TRACE_UNIT,
    "residual": "relative to the eigenvalue",
    "density.squared_norm": f"({TRACE_UNIT}) squared",
    "guard": "relative differences",
}


def needed_sequences(settings: CurvatureSettings) -> int:
    """Return the sequences of the text that a measurement reads."""
    if not isinstance(settings, HutchinsonSettings):
        return max(settings.fixed_sequences, settings.microbatch_sequences)
    microbatches = max(settings.pairs, settings.norm_pairs, settings.companion_pairs)
    fixed = settings.fixed_sequences if settings.lambda_max else 0
    return max(microbatches * settings.microbatch_sequences, fixed)


def measure(
    hf_dir: Path, settings: CurvatureSettings, data_prefix: Path, ranks: Ranks
) -> dict[str, Any]:
    """Return the content of result.json, without writing it.

    Raises:
        UserError: model, text, settings and ranks do not fit, a loss is not finite, or the guard
            refuses.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "guard"):
        subject = open_model(
            hf_dir, settings, data_prefix, ranks, needed=needed_sequences(settings)
        )
    entries = subject.hessian.parameters.size // (ranks.size if settings.sharding == "fsdp" else 1)
    vectors_device = torch.device("cpu") if settings.vectors == "host" else ranks.device
    check_room(settings, entries, vectors_device)
    if isinstance(settings, HutchinsonSettings):
        with _timed(seconds, "traces"):
            measured = measure_traces(subject, settings)
        if settings.lambda_max:
            with _timed(seconds, "lambda_max"):
                measured |= measure_top(subject, settings)
    else:
        with _timed(seconds, "spectrum"):
            measured = measure_spectrum(subject, settings)
    return subject.result(measured | {"units": UNITS}, {"name": settings.name}, seconds)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Record the seconds that the context lasts."""
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
