"""Forecasts and the back-test, in lines for a terminal and as a table of the report.

The error is the KL divergence: positive whatever the noise, so it has a logarithm.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from base.aligned import aligned, wrapped
from base.quantities import MILLI, MILLINATS, significant, with_interval
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
from study.axes import AnyRun, amount_name
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
TOO_FEW = (
    "the learning rate is not known, or there are too few cooldowns of other settings, each with"
    " its seeds taken as one"
)
WIDE = 3.0  # factor by which an interval is off its middle, from which on it is said in words
RUNS_SHOWN = 12  # on one screen


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


class Projection(NamedTuple):
    """A run at a spec as it would end if it were annealed now.

    Attributes:
        label: of the run.
        name: of the run.
        spec: that it is quantized with.
        target: the cooldown; None where no checkpoint of the stable phase is measured yet.
        learned: the cooldowns that the forecasts are by.
        forecasts: by the names of the models that have one.
        averages: the errors of averages at its start, in lines.
    """

    label: str
    name: str
    spec: str
    target: Cooldown | None = None
    learned: Sequence[Cooldown] = ()
    forecasts: Mapping[str, Forecast] = {}
    averages: Sequence[str] = ()


def projections(
    source: MeasuredStudy, others: Sequence[MeasuredStudy], runs: Sequence[AnyRun]
) -> list[Projection]:
    """Return what each run would lose if annealed from its last stable checkpoint, by spec."""
    return [
        _projection(source, others, run, spec)
        for run in runs
        for spec in source.study.quantization.specs
    ]


def _projection(
    source: MeasuredStudy, others: Sequence[MeasuredStudy], run: AnyRun, spec: str
) -> Projection:
    label, column = source.study.label_of(run), DIVERGENCE.of(spec)
    measured = [row for row in source.stable(run) if row.get(column)]
    # The newest measured checkpoint, as if the rate began to fall right there.
    start = source.at(run, measured[-1], spec) if measured else None
    if start is None:
        return Projection(label, run.name, spec)
    cooldowns = [each for study in (source, *others) for each in study.cooldowns(spec)]
    # The end is not known: the median growth of log tokens in those cooldowns is assumed.
    learned = _teaching(cooldowns, start)
    growth = median(cooldown.growth for cooldown in learned) if learned else math.log(1 + COOLDOWN)
    target = replace(start, tokens_end=round(start.tokens * math.exp(growth)))
    by_model = {model.name: model.forecast(target, learned) for model in MODELS}
    known = {name: forecast for name, forecast in by_model.items() if forecast}
    averages = list(_averages(source.rows, measured[-1], run, spec))
    return Projection(label, run.name, spec, target, learned, known, averages)


def forecast_lines(
    source: MeasuredStudy,
    others: Sequence[MeasuredStudy],
    projected: Sequence[Projection],
    *,
    whole: bool = False,
) -> Iterator[str]:
    """Yield the answer, a table of the first spec, and what has no forecast; `whole` with all."""
    spec = source.study.quantization.specs[0]
    shown = [each for each in projected if each.spec == spec and each.target]
    title = f"KL divergence ({spec_title(spec)})"
    if shown:
        cooldowns = [each for study in (source, *others) for each in study.cooldowns(spec)]
        yield from wrapped(_answer(shown, title))
        yield from wrapped(_ranked(verdict(back_test(cooldowns))))
        yield ""
        yield from _table(shown)
        yield from wrapped(f"{title}, {MILLINATS}: now, and after the anneal by each model")
    yield from _without(projected, shown)
    if not whole:
        yield "--all adds every spec, every interval, what was learned from, and averages"
        return
    for each in projected:
        if each.target:
            yield ""
            yield from _in_full(each, each.target)


def _answer(shown: Sequence[Projection], title: str) -> str:
    """Return the forecasts in a sentence: their range by each model, and how uncertain they are."""
    who = shown[0].label if len(shown) == 1 else f"{len(shown)} runs"
    by_model = {
        model.name: errors
        for model in MODELS
        if (
            errors := [
                each.forecasts[model.name].error for each in shown if model.name in each.forecasts
            ]
        )
    }
    ranges = [
        f"{_reach(MILLI * error for error in errors)} by {name}"
        for name, errors in by_model.items()
    ]
    factors = [_factor(forecast) for each in shown for forecast in each.forecasts.values()]
    known = [factor for factor in factors if factor]
    if not known:
        uncertain = "; how uncertain is not known: no other cooldown to learn from"
    elif max(known) >= WIDE:
        uncertain = f", uncertain by a factor of {_reach(known, 2)}"
    else:
        uncertain = ""
    return f"{who}, if annealed now: {title} of {', '.join(ranges)} ({MILLINATS}){uncertain}"


def _reach(values: Iterable[float], digits: int = 3) -> str:
    """Return the least and the largest of some values, as one where they are alike."""
    values = list(values)
    return " to ".join(dict.fromkeys(significant(end(values), digits) for end in (min, max)))


def _factor(forecast: Forecast) -> float | None:
    """Return by which factor an interval is above and below the forecast."""
    return forecast.interval and forecast.interval[1] / forecast.error


def _ranked(words: str) -> str:
    return words.replace("Not decided: ", "Which model forecasts best is not decided: ")


def _table(shown: Sequence[Projection]) -> Iterator[str]:
    names = [model.name for model in MODELS if any(model.name in each.forecasts for each in shown)]
    rows = [["run", "at step", "annealed to", "now", *names]]
    for each in shown[:RUNS_SHOWN]:
        target = each.target
        assert target
        tokens = f"{amount_name(target.tokens_end).upper()} tokens"
        cells = [_cell(each.forecasts.get(name)) for name in names]
        rows.append(
            [each.label, f"{target.step:,}", tokens, significant(MILLI * target.error), *cells]
        )
    yield from aligned(rows, right={1})
    if len(shown) > RUNS_SHOWN:
        yield f"and {len(shown) - RUNS_SHOWN} more runs"


def _cell(forecast: Forecast | None) -> str:
    """Return a forecast; an interval too wide to read is in the sentence above the table."""
    if forecast is None:
        return "-"
    factor = _factor(forecast)
    if forecast.interval is None or (factor and factor >= WIDE):
        return significant(MILLI * forecast.error)
    return with_interval(forecast.error, *forecast.interval, MILLI)


def _without(projected: Sequence[Projection], shown: Sequence[Projection]) -> Iterator[str]:
    """Yield what has no forecast, each reason once with the runs that it holds for."""
    unmeasured = dict.fromkeys(each.label for each in projected if not each.target)
    if unmeasured:
        what = _of_runs([*unmeasured], {each.label for each in projected})
        yield from wrapped(
            f"no forecast of {what}: no checkpoint of its stable phase is measured yet"
        )
    lacking: dict[tuple[str, ...], list[str]] = {}
    for each in shown:
        silent = tuple(model.name for model in MODELS if model.name not in each.forecasts)
        if silent:
            lacking.setdefault(silent, []).append(each.label)
    for names, labels in lacking.items():
        what = _of_runs(labels, {each.label for each in shown})
        yield from wrapped(f"no forecast of {what} by {'; '.join(names)}: {TOO_FEW}")


def _of_runs(labels: Sequence[str], every: Collection[str]) -> str:
    return "any run" if len(labels) == len(every) > 1 else "; ".join(labels)


def _teaching(cooldowns: Sequence[Cooldown], target: Cooldown) -> list[Cooldown]:
    """Return the cooldowns that a run may learn from: of others, or its own that ended before."""
    return [
        other
        for other in cooldowns
        if other.stem != target.stem or other.tokens_end <= target.tokens
    ]


def _in_full(projection: Projection, target: Cooldown) -> Iterator[str]:
    learned = projection.learned
    yield from wrapped(
        f"{projection.label} ({projection.name}), {spec_title(projection.spec)}:"
        f" {significant(MILLI * target.error)} at step {target.step} ({target.tokens:,} tokens); if"
        f" annealed from there to {target.tokens_end:,} tokens, by {_counted(learned)}"
    )
    for name, forecast in projection.forecasts.items():
        yield f"    {name:32} {_words(forecast)}"
    yield from projection.averages


def _counted(learned: Sequence[Cooldown]) -> str:
    groups = len({cooldown.group for cooldown in learned})
    if not learned:
        return "no cooldown of another run (--from names studies that have some)"
    return f"cooldowns of other runs: {len(learned)}, in groups of seeds: {groups}"


def _words(forecast: Forecast) -> str:
    error = significant(MILLI * forecast.error)
    if forecast.interval is None:
        return f"{error}  (no other cooldown, so no interval)"
    low, high = (significant(MILLI * end) for end in forecast.interval)
    return f"{error}  {LEVEL:.0%} interval [{low}, {high}]"


def _averages(rows: Sequence[Row], start: Row, run: AnyRun, spec: str) -> Iterator[str]:
    """Yield the error of each LAWA window at the start: measured there, so no forecast."""
    column = DIVERGENCE.of(spec)
    windows = run.averages if isinstance(run, RunConfig) else ()
    for window in (each for each in windows if isinstance(each, Lawa)):
        wanted = (start["run"], start["step"], window.name)
        for row in rows:
            if (row["run"], row["step"], row["average"]) == wanted and row.get(column):
                values = (row[column], row[f"{column}_low"], row[f"{column}_high"])
                yield (
                    f"    {window.describe()}: {DIVERGENCE.difference(*values)}, measured at step"
                    f" {start['step']}, no forecast ({INTERVAL_LEVEL:.0%} interval)"
                )
