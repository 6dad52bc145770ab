"""Results of quant_eval as people read them: a verdict or a table with its units, then the files.

Losses are in nats/token, their differences in 10^-3 nats/token, and accuracies in percent.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from base.aligned import aligned, shortened, wrapped
from base.quantities import MILLI, MILLINATS, NONE, significant, with_interval
from base.statistics import INTERVAL_LEVEL
from ckpt_tools.hf.comparing import ShownFigure
from ckpt_tools.hf.measured import Accuracy, Interval, Outliers, Quantization, Tasks
from ckpt_tools.hf.results import Result

PERCENT = 100.0
FIGURES = {
    "cross_entropy": ShownFigure("loss in full precision", MILLINATS, MILLI, decimals=4),
    "cross_entropy_quantized": ShownFigure("loss once quantized", MILLINATS, MILLI, decimals=4),
    "absolute_error": ShownFigure("increase of the loss", MILLINATS, MILLI),
    "relative_error": ShownFigure("relative increase of the loss", "%", PERCENT),
    "kl_divergence": ShownFigure("KL divergence", MILLINATS, MILLI),
    "top1_agreement": ShownFigure("agreement on the most likely token", "%", PERCENT),
}
INTERVALS = f"{INTERVAL_LEVEL:.0%} intervals"
OUTLIERS = {
    "kurtosis": "kurtosis",
    "max_to_mean": "largest over the mean",
    "max_to_median": "largest over the median",
    "top_channels": "share of squares in 1% of channels",
}
SHOWN_ROWS = 18
SHOWN_DEAD = 4  # linears that are named


def lines(results: Sequence[Result[Any]], kept: int) -> list[str]:
    """Return the results of one command, of which `kept` were there before."""
    measured = results[0].measured
    if isinstance(measured, Quantization):
        shown = [*_losses(results), *_dead(results)]
    elif isinstance(measured, Tasks):
        shown = [*_accuracies(results), *_dead(results)]
    else:
        shown = [line for result in results for line in _outliers(result)]
    return [*shown, "", *_files(results, kept)]


def _losses(results: Sequence[Result[Quantization]]) -> Iterator[str]:
    """Yield a row per model and spec, after what they share."""
    yield f"loss in nats/token; increase and KL divergence in {MILLINATS}, with {INTERVALS}"
    models = _models(results)
    rows: list[tuple[str, ...]]
    if models:
        rows = [("spec", "loss", "increase", "KL divergence")]
    else:
        loss = _loss(results[0].measured.cross_entropy)
        yield f"{results[0].model.path}: loss {loss} in full precision"
        rows = [("spec", "quantized", "increase", "KL divergence", "relative increase, %")]
    yield ""
    for result in results:
        figures = result.measured
        costs = [_interval(figures, name, MILLI) for name in ("absolute_error", "kl_divergence")]
        if models:
            cells = [_loss(figures.cross_entropy), *costs]
        else:
            relative = figures.relative_error
            share = NONE if relative is None else significant(PERCENT * relative)
            cells = [_loss(figures.cross_entropy_quantized), *costs, share]
        rows.append((result.spec.name, *cells))
    yield from _with_models(rows, models)


def _loss(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"


def _accuracies(results: Sequence[Result[Tasks]]) -> Iterator[str]:
    """Yield the loss of accuracy of each model and spec in a sentence, then a row per task."""
    models = _models(results)
    rows, models_of_rows = [("spec", "task", "full", "quantized", "lost", "p")], list[str]()
    for index, result in enumerate(results):
        tasks = result.measured.tasks
        name = f"{models[index]} {result.spec.name}" if models else result.spec.name
        mean = result.measured.mean if len(tasks) > 1 else None
        shown = tasks | ({"mean": mean} if mean else {})
        yield from wrapped(f"{name} {_lost([*shown.values()][-1], len(tasks))}")
        for task, row in shown.items():
            accuracies = row.accuracy, row.accuracy_quantized
            full, quantized = (
                NONE if each is None else f"{PERCENT * each:.1f}" for each in accuracies
            )
            p_value = NONE if row.p_value is None else f"{row.p_value:.2g}"
            lost = _interval(row, "difference", PERCENT)
            rows.append((result.spec.name, task, full, quantized, lost, p_value))
            models_of_rows += models[index : index + 1]
    yield ""
    points = f"lost in percentage points, with {INTERVALS} over items"
    yield f"accuracy in %; {points}; p by McNemar's test"
    yield from _with_models(rows, models_of_rows)


def _lost(row: Accuracy, tasks: int) -> str:
    """Return in words what quantization does to the accuracy on one task, or the mean of some."""
    over = f"mean of {tasks} tasks" if tasks > 1 else f"{row.items:,} items"
    interval = row.intervals.get("difference")
    points = f"{_interval(row, 'difference', PERCENT)} percentage points"
    if interval is None or interval[0] <= 0 <= interval[1]:
        return f"loses no significant accuracy: {points} ({over})"
    if interval[0] < 0:
        points = f"{_interval(row, 'difference', -PERCENT)} percentage points"
        return f"gains {points} of accuracy ({over})"
    return f"loses {points} of accuracy ({over})"


def _outliers(result: Result[Outliers]) -> Iterator[str]:
    """Yield a row per statistic of a model."""
    yield f"{result.model.path}: mean over linears with {INTERVALS}, the largest, and where"
    rows = [("statistic", "mean", "largest", "in")]
    for name, figure in result.measured.figures.items():
        subject, _, statistic = name.partition("_")
        title = f"{subject}s: {OUTLIERS.get(statistic, statistic)}"
        linear = figure.linear or NONE
        if figure.mean is None or figure.max is None:
            rows.append((title, NONE, "undefined", f"{linear}: zeros alone, or in half of a row"))
            continue
        mean = significant(figure.mean)
        if figure.interval:
            mean = with_interval(figure.mean, *figure.interval)
        rows.append((title, mean, significant(figure.max), linear))
    yield from aligned(rows)


def _models(results: Sequence[Result[Any]]) -> list[str]:
    """Return a name of each result's model below what all share, none where all are of one."""
    paths = [result.model.path for result in results]
    if len(set(paths)) == 1:
        return []
    parent = os.path.commonpath([Path(path).parent for path in paths])
    return [os.path.relpath(path, parent) for path in paths]


def _with_models(rows: Sequence[Sequence[str]], models: Sequence[str]) -> list[str]:
    """Return the table, with a column of models if there are any."""
    if models:
        rows = [(model, *row) for model, row in zip(("model", *models), rows, strict=True)]
    return shortened(aligned(rows), SHOWN_ROWS, "in their files")


def _interval(measured: Quantization | Accuracy, figure: str, scale: float) -> str:
    """Return a figure with its interval."""
    value: float | None = getattr(measured, figure)
    interval: Interval | None = measured.intervals.get(figure)
    if value is None:
        return NONE
    if interval is None:
        return significant(scale * value)
    low, high = interval if scale > 0 else (interval[1], interval[0])
    return with_interval(value, low, high, scale)


def _dead(results: Sequence[Result[Any]]) -> Iterator[str]:
    """Yield a note on linears that the calibration text does not reach."""
    names = dict.fromkeys(name for result in results for name in _dead_linears(result.measured))
    if names:
        listed = ", ".join(list(names)[:SHOWN_DEAD])
        more = f" and {len(names) - SHOWN_DEAD} more" if len(names) > SHOWN_DEAD else ""
        yield ""
        yield from wrapped(
            "every calibration input of these linears is zero, so the text has no part in how they"
            f" are rounded: {listed}{more}"
        )


def _dead_linears(measured: Quantization | Tasks) -> list[str]:
    if isinstance(measured, Tasks):
        return measured.dead_linears
    return [linear.name for linear in measured.layers if linear.dead]


def _files(results: Sequence[Result[Any]], kept: int) -> list[str]:
    """Return where the results are, and how many of them were not measured again."""
    if len(results) == 1:
        return [f"{'kept, measured before' if kept else 'written'}: {results[0].path}"]
    before = f" ({kept} of them kept, measured before)" if kept else ""
    common = os.path.commonpath([result.path.parent.parent for result in results])
    return [f"{len(results)} results{before} below {common}"]
