"""Forecasts and the back-test, in lines for a terminal and as a table of the report."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from base.statistics import INTERVAL_LEVEL
from dynamics.forecast.backtest import Score, back_test, verdict
from dynamics.forecast.cooldowns import ERROR, Source, all_cooldowns
from dynamics.forecast.models import LEAST_PAST, LEVEL, MODELS, Cooldown, Forecast
from study.axes import AnyRun
from study.definition import Study
from study.measurements.titles import spec_title
from study.report.cells import Cell, Table, number
from study.results.averages import average_title
from study.results.table import Row
from train.run.config import RunConfig
from train.run.optimization import Lawa

# Tokens of a cooldown over those before it, where no other shows how long they are: with 20% a
# constant rate reaches the loss of a cosine (arXiv 2405.18392).
COOLDOWN = 0.2
NOTE = (
    "KL divergence in nats per token after each cooldown, forecast where it starts by what the"
    " other runs' cooldowns teach; all seeds of a run are left out together. Error:"
    f" |log(forecast / measured)|. Intervals are {LEVEL:.0%}, Student's by the residuals of the"
    " runs that are learned from. Models have at most two coefficients."
)
NO_FORECAST = (
    "No forecast by a model: its signal is not measured, the stable phase has fewer than"
    f" {LEAST_PAST} checkpoints, or there are too few cooldowns of other settings, each with its"
    " seeds taken as one."
)


def back_test_tables(directory: Path, study: Study, rows: Sequence[Row]) -> list[Table]:
    """Return a table of the models' scores; none for a study without measured cooldowns."""
    body, verdicts = [], []
    for spec in study.quantization.specs:
        cooldowns = Source(study, rows, directory).cooldowns(spec)
        if len({cooldown.group for cooldown in cooldowns}) < 2:
            continue
        scores = back_test(cooldowns)
        body += [_line(spec, score) for score in scores if score.forecasts]
        verdicts.append(f"{spec_title(spec)}: {verdict(scores)}")
    if not body:
        return []
    title, note = "Forecast of the error after a cooldown", " ".join((NOTE, *verdicts))
    head = ["quantization", "model", "cooldowns", "median error", "largest", "inside interval"]
    return [Table(title, note, head, body)]


def _line(spec: str, score: Score) -> list[Cell]:
    inside, intervals = score.covered
    return [
        Cell(spec_title(spec)),
        Cell(score.model.name),
        number(len(score.forecasts), "d"),
        number(median(score.errors), ".3f"),
        number(max(score.errors), ".3f"),
        Cell(f"{inside} of {intervals}" if intervals else "no interval"),
    ]


def forecast_runs(study: Study) -> list[AnyRun]:
    """Return the runs that hold a stable phase of their own."""
    return [run for run in study.runs if _starts_anew(run)]


def _starts_anew(run: AnyRun) -> bool:
    if isinstance(run, RunConfig):
        return run.branch_from is None
    return not (run.parent or run.restarts or run.average_of)


def forecast_lines(own: Source, others: Sequence[Source], run: AnyRun) -> Iterator[str]:
    """Yield what the model would lose if annealed from its last stable checkpoint, by spec."""
    yield f"{own.study.label_of(run)} ({run.name})"
    for spec in own.study.quantization.specs:
        column = f"quant/{spec}/{ERROR}"
        measured = [row for row in own.stable(run) if row.get(column)]
        start = own.at(run, measured[-1], spec) if measured else None
        if start is None:
            yield f"  {spec_title(spec)}: no checkpoint of the stable phase is measured yet"
            continue
        learned = _teaching(all_cooldowns([own, *others], spec), start)
        growth = (
            median(cooldown.growth for cooldown in learned) if learned else math.log(1 + COOLDOWN)
        )
        tokens_end = round(start.past[-1][0] * math.exp(growth))
        yield from _of_spec(spec, replace(start, tokens_end=tokens_end), learned)
        yield from _averages(own.rows, measured[-1], run, spec)


def _teaching(cooldowns: Sequence[Cooldown], target: Cooldown) -> list[Cooldown]:
    """Return the cooldowns that a run may learn from: of others, or its own that ended before."""
    return [
        other
        for other in cooldowns
        if other.stem != target.stem or other.tokens_end <= target.past[-1][0]
    ]


def _of_spec(spec: str, target: Cooldown, learned: Sequence[Cooldown]) -> Iterator[str]:
    tokens, error = target.past[-1]
    yield (
        f"  {spec_title(spec)}, KL divergence in nats per token: {error:.3g} at step"
        f" {target.step} ({tokens:,} tokens); if annealed from there to {target.tokens_end:,}"
        f" tokens, by {_counted(learned)}"
    )
    silent = []
    for model in MODELS:
        forecast = model.forecast(target, learned)
        if forecast:
            yield f"    {model.name:32} {_words(forecast)}"
        else:
            silent.append(model.name)
    if silent:
        yield f"    no forecast by {'; '.join(silent)}"


def _counted(learned: Sequence[Cooldown]) -> str:
    groups = len({cooldown.group for cooldown in learned})
    if not learned:
        return "no cooldown of another run (--from names studies that have some)"
    return f"cooldowns of other runs: {len(learned)}, in groups of seeds: {groups}"


def _words(forecast: Forecast) -> str:
    if forecast.interval is None:
        return f"{forecast.error:.3g}  (no other cooldown, so no interval)"
    low, high = forecast.interval
    return f"{forecast.error:.3g}  {LEVEL:.0%} interval [{low:.3g}, {high:.3g}]"


def _averages(rows: Sequence[Row], start: Row, run: AnyRun, spec: str) -> Iterator[str]:
    """Yield the error of each LAWA window at the start: measured there, so no forecast."""
    column = f"quant/{spec}/{ERROR}"
    windows = run.averages if isinstance(run, RunConfig) else ()
    for window in (each for each in windows if isinstance(each, Lawa)):
        place = (start["run"], start["step"], window.name)
        for row in rows:
            if (row["run"], row["step"], row["average"]) == place and row.get(column):
                low, high = row[f"{column}_low"], row[f"{column}_high"]
                yield (
                    f"    {average_title(window)}: {row[column]:.3g} {INTERVAL_LEVEL:.0%} interval"
                    f" [{low:.3g}, {high:.3g}], measured at step {start['step']}, no forecast"
                )
