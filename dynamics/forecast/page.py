"""Forecasts and the back-test, in lines for a terminal and as a table of the report.

The error is the KL divergence: positive whatever the noise, so it has a logarithm.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from base.statistics import INTERVAL_LEVEL
from dynamics.forecast.models import (
    LEVEL,
    MODELS,
    Cooldown,
    Forecast,
    ForecastScore,
    back_test,
    verdict,
)
from study.axes import AnyRun
from study.claims.verdict import Evidence
from study.definition import Study
from study.measurements.quantization import DIVERGENCE
from study.measurements.titles import spec_title
from study.released import stage_before
from study.report.cells import Cell, Table, number
from study.results.collect import collect_rows
from study.results.summary import Rows, at_high_rate, lineage, summarize
from study.results.table import Row, trained
from train.run.config import RunConfig
from train.run.optimization import Lawa

# The unit of the learning rate: where all cooldowns grow the tokens alike, it does not matter.
UNIT_RATE = 1e-3
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
    "No forecast by a model: the learning rate is not known, or there are too few cooldowns of"
    " other settings, each with its seeds taken as one."
)


@dataclass(frozen=True)
class MeasuredStudy:
    """A study with all that is measured of it."""

    study: Study
    rows: Rows
    directory: Path

    @classmethod
    def read(cls, directory: Path, study: Study) -> "MeasuredStudy":
        """Return a study with all that is measured by now; it may be under way."""
        return cls(study, collect_rows(directory, study).rows, directory)

    def cooldowns(self, spec: str) -> list[Cooldown]:
        """Return every cooldown whose start and end are measured with this spec."""
        cooldowns = []
        for end in summarize(self.study, self.rows):
            # A cooldown is scored only where both of its ends are there.
            if end.first is None or end.last is None:
                continue
            error = _error(end.last, spec)
            start = self.at(end.run, end.first, spec)
            if start and error and end.last["tokens"]:
                cooldowns.append(replace(start, tokens_end=end.last["tokens"], error_end=error))
        return cooldowns

    def at(self, run: AnyRun, start: Row, spec: str) -> Cooldown | None:
        """Return the cooldown of a run that starts at a row.

        Its end is the start, as no row here says where it ends. None where the error there is not
        measured.
        """
        error, rate = _error(start, spec), start.get("peak_lr")
        if not error or not start["tokens"]:
            return None
        return Cooldown(
            label=self._label(self.study.label_of(run)),
            group=self._label(self._group(run)),
            stem=self._label(self.study.group_of(self._holder(run)).label),
            step=start["step"],
            tokens=start["tokens"],
            error=error,
            log_rate=math.log(rate / UNIT_RATE) if rate else None,
            tokens_end=start["tokens"],
            error_end=None,
        )

    def stable(self, run: AnyRun) -> list[Row]:
        """Return the weights of a run's lineage at its high rate."""
        rows = list(lineage(self.study, self.rows, run))
        if isinstance(run, RunConfig):
            return [row for row in trained(rows) if row["phase"] == "stable"]
        return list(at_high_rate(rows))

    def _holder(self, run: AnyRun) -> AnyRun:
        """Return the run that holds the stable phase."""
        if isinstance(run, RunConfig):
            return self.study.parent_of(run) if run.branch_from else run
        before = stage_before(self.study.runs, run)
        return self._holder(before) if before else run

    def _group(self, run: AnyRun) -> str:
        """Return the label of the runs that are left out together: all anneals of a model."""
        return self.study.group_of(run).label if isinstance(run, RunConfig) else run.model

    def _label(self, label: str) -> str:
        return f"{self.study.name}: {label}"


def _error(row: Row, spec: str) -> float | None:
    """Return the error of a row; None where it is not measured, or has no logarithm."""
    error = row.get(DIVERGENCE.of(spec))
    return error if error and error > 0 else None


def back_test_tables(evidence: Evidence) -> list[Table]:
    """Return a table of the models' scores; none for a study without measured cooldowns."""
    body, verdicts = [], []
    study, directory = evidence.study, evidence.paired.directory
    for spec in study.quantization.specs:
        cooldowns = MeasuredStudy(study, evidence.table, directory).cooldowns(spec)
        # Groups are left out whole, so a single one leaves nothing to learn from.
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


def _line(spec: str, score: ForecastScore) -> list[Cell]:
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


def forecast_lines(
    source: MeasuredStudy, others: Sequence[MeasuredStudy], run: AnyRun
) -> Iterator[str]:
    """Yield what the model would lose if annealed from its last stable checkpoint, by spec."""
    yield f"{source.study.label_of(run)} ({run.name})"
    for spec in source.study.quantization.specs:
        column = DIVERGENCE.of(spec)
        measured = [row for row in source.stable(run) if row.get(column)]
        # The newest measured checkpoint, as if the rate began to fall right there.
        start = source.at(run, measured[-1], spec) if measured else None
        if start is None:
            yield f"  {spec_title(spec)}: no checkpoint of the stable phase is measured yet"
            continue
        cooldowns = [each for measured in (source, *others) for each in measured.cooldowns(spec)]
        # The end is not known: the median growth of log tokens in those cooldowns is assumed.
        learned = _teaching(cooldowns, start)
        growth = (
            median(cooldown.growth for cooldown in learned) if learned else math.log(1 + COOLDOWN)
        )
        tokens_end = round(start.tokens * math.exp(growth))
        yield from _of_spec(spec, replace(start, tokens_end=tokens_end), learned)
        yield from _averages(source.rows, measured[-1], run, spec)


def _teaching(cooldowns: Sequence[Cooldown], target: Cooldown) -> list[Cooldown]:
    """Return the cooldowns that a run may learn from: of others, or its own that ended before."""
    return [
        other
        for other in cooldowns
        if other.stem != target.stem or other.tokens_end <= target.tokens
    ]


def _of_spec(spec: str, target: Cooldown, learned: Sequence[Cooldown]) -> Iterator[str]:
    yield (
        f"  {spec_title(spec)}, KL divergence in nats per token: {target.error:.3g} at step"
        f" {target.step} ({target.tokens:,} tokens); if annealed from there to"
        f" {target.tokens_end:,} tokens, by {_counted(learned)}"
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
    column = DIVERGENCE.of(spec)
    windows = run.averages if isinstance(run, RunConfig) else ()
    for window in (each for each in windows if isinstance(each, Lawa)):
        wanted = (start["run"], start["step"], window.name)
        for row in rows:
            if (row["run"], row["step"], row["average"]) == wanted and row.get(column):
                low, high = row[f"{column}_low"], row[f"{column}_high"]
                yield (
                    f"    {window.describe()}: {row[column]:.3g} {INTERVAL_LEVEL:.0%} interval"
                    f" [{low:.3g}, {high:.3g}], measured at step {start['step']}, no forecast"
                )
