"""Tables of whole recipes with made-up but plausible numbers, without a file of a model: for
tests of figures at the size of the paper, and for looking at them.
"""

import math
from pathlib import Path
from typing import Any

from study.definition import Study
from study.figures.canvas import Canvas
from study.measurements.curvature import CONVERGED, RELATIVE, RESIDUAL, TOP, TRACE
from study.paths import MeasuredModel
from study.released import ReleasedRevision, ReleasedRun
from study.results.collect import phase_of
from study.results.table import Row, figure_columns
from tests.sealing import json_lines
from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run.schedules import learning_rate

PEAK = 3e-3  # of a usual run
LOWEST, AT_HIGH_RATES = 3.36, 0.25  # of the loss at the end, and what a high rate adds to it


def loss_at(tokens: float, most: float, share: float, peak: float) -> float:
    """Falls with tokens, and as the rate decays; slower at peaks far from the usual one."""
    early = 0.07 * (tokens / most + 1e-3) ** -0.5
    return LOWEST + AT_HIGH_RATES * share + early + 0.1 * abs(math.log10(peak / PEAK))


def error_at(bits: int, tokens: float, most: float, share: float, peak: float) -> float:
    """Flat at a constant rate after a rise, higher as it decays, lower at higher peaks."""
    wobble = 1 + 0.03 * math.sin(97 * tokens / most)
    rise = 1 - 0.8 * math.exp(-25 * tokens / most)
    size = 0.0055 * (peak / PEAK) ** -0.45 * rise * wobble * (1 + 0.9 * (1 - share) ** 2)
    return size * 2.0 ** (2.3 * (4 - bits))


def made_up(study: Study) -> list[Row]:
    """A row for every measured model of a study, with losses, errors and curvature."""
    empty = dict.fromkeys(figure_columns(study))
    models = [(run, model) for run in study.runs for model in study.models_of(run)]
    most = max(filter(None, (_tokens(run, model) for run, model in models)))
    return [Row.of(empty | _row(study, run, model, most)) for run, model in models]


def _tokens(run: RunConfig | ReleasedRun, model: MeasuredModel) -> int | None:
    if isinstance(run, RunConfig):
        return run.tokens_at(model.step)
    return _revision(run, model).tokens


def _revision(run: ReleasedRun, model: MeasuredModel) -> ReleasedRevision:
    """An average is at the place of the last that it takes in."""
    return run.named(Path(model.members[-1]).name if model.members else model.revision)


def _row(
    study: Study, run: RunConfig | ReleasedRun, model: MeasuredModel, most: int
) -> dict[str, Any]:
    step, tokens = model.step, _tokens(run, model)
    at: int | None = step
    if isinstance(run, RunConfig):
        rate, peak = learning_rate(run, step), run.optimizer.peak_lr
    else:
        # one peak for all stages, those of post-training aside
        revision = _revision(run, model)
        rate, at = revision.learning_rate or 0.0, revision.step
        peak = max(each.peak_lr or 0 for each in study.runs if isinstance(each, ReleasedRun))
    values: dict[str, Any] = {"study": study.name, "run": run.name, "average": model.average}
    values |= {"phase": phase_of(run, step), "step": at, "tokens": tokens, "peak_lr": peak}
    values |= {"learning_rate": rate}
    # An average is as good as weights of a lower rate, and better quantized.
    share = 0.4 * rate / peak if model.average else rate / peak
    usual = peak if isinstance(run, RunConfig) else PEAK
    loss = loss_at(tokens or most, most, share, usual)
    values["held_out_loss"] = loss - 0.05
    for spec in study.quantization.at_the_end:
        bits = 3 if "b3" in spec else 4
        error = error_at(bits, tokens or most, most, 1.0 if model.average else share, usual)
        error *= 0.7 if model.average else 1
        if isinstance(run, RunConfig):
            error *= (run.optimizer.weight_decay / 0.1) ** 0.15 if run.optimizer.weight_decay else 1
            error *= 0.9 if getattr(run.optimizer, "decay", "") == "adamc" else 1
        column = f"quant/{spec}"
        figures = {"cross_entropy": loss, "cross_entropy_quantized": loss * (1 + error)}
        figures |= {"absolute_error": loss * error, "relative_error": error}
        figures |= {"kl_divergence": 1.1 * loss * error, "top1_agreement": 1 - 4 * error}
        for name, value in figures.items():
            values |= {f"{column}/{name}": value, f"{column}/{name}_low": 0.97 * value}
            values |= {f"{column}/{name}_high": 1.03 * value}
    if study.curvature and not model.average:
        sharpness = 900 * (usual / PEAK) ** -0.8 * (1 + 4 * (1 - share) ** 2)
        for trace, value in ((TRACE, sharpness), (RELATIVE, 0.2 * sharpness)):
            values |= {trace.name: value, f"{trace.name}_low": 0.9 * value}
            values |= {f"{trace.name}_high": 1.1 * value}
        if study.curvature.lambda_max:
            values |= {TOP.name: sharpness / 40, RESIDUAL.name: 0.008, CONVERGED.name: True}
    return values


def canvas_of(directory: Path, study: Study, evaluations: int = 60) -> Canvas:
    """The canvas of a study whose runs have so many evaluations in training."""
    rows = made_up(study)
    most = max(row["tokens"] for row in rows if row["tokens"])
    for run in study.trained:
        first = run.branch_from.step or 0 if run.branch_from else 0
        every = max(1, (run.total_steps - first) // evaluations)
        lines = []
        for step in range(first + every, run.total_steps + 1, every):
            tokens, peak = run.tokens_at(step), run.optimizer.peak_lr
            loss = loss_at(tokens, most, learning_rate(run, step) / peak, peak) - 0.05
            lines.append(
                {"step": step, "tokens": tokens, "attempt": 1, "time": 0.0, "held_out_loss": loss}
            )
        metrics = RunDirectory(directory / run.name).metrics
        metrics.parent.mkdir(parents=True, exist_ok=True)
        metrics.write_text(json_lines(lines))
    return Canvas(study, rows, directory)
