"""The output of `python -m slurm status`: tables on a terminal, else the same as plain lines."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slurm.status.overview import ALIVE, MARKS, Element, Overview, last_error, least_seconds_left
from study.pipeline.step import Step

Row = tuple[str, ...]

ELEMENTS_SHOWN = 20
MARKS_PER_ROW = 40
TRAINING = ("training", "state", "step", "tokens", "loss", "tokens/s", "left", "saved")
WRAPPED = ("state", "not made")  # of these columns, where the terminal is narrow
MEASURING = ("measuring", "of", "made", "checkpoints", "not made")


@dataclass(frozen=True)
class Shown:
    """The output: lines, then tables, each a heading and rows, then lines."""

    first: tuple[str, ...]
    tables: tuple[tuple[Row, ...], ...]
    last: tuple[str, ...]


def shown(overview: Overview) -> Shown:
    """Return the whole output."""
    counts = overview.counts
    made, total = counts["made"], len(overview.steps)
    first = [
        f"{overview.study.name}: {made:,}/{total:,} steps made{_others(counts)}; {_eta(overview)}"
    ]
    if overview.without_slurm:
        first.append(f"by marker files alone: {overview.without_slurm}")
    first += [f"excluded {node}: {reason}" for node, reason in overview.excluded.items()]
    tables = [(TRAINING, *training_rows(overview))] if overview.trainings else []
    tables.append((MEASURING, *measuring_rows(overview)))
    legend = ", ".join(f"{mark} {word}" for word, mark in MARKS.items() if counts[word])
    last = [f"checkpoints: {legend}", *_slow(overview), *_restarted(overview), *_failures(overview)]
    return Shown(tuple(first), tuple(tables), tuple(last))


def training_rows(overview: Overview) -> list[Row]:
    """Return a row per run that is trained here."""
    rows: list[Row] = []
    for run in overview.study.trained:
        one = overview.trainings[run.name]
        step = next(
            step for step in overview.steps if step.kind == "train" and step.run == run.name
        )
        over = overview.situations[step.name] == "made"
        rows.append(
            (
                run.name,
                _training_state(overview, step),
                f"{one.step or 0:,}/{run.total_steps:,}",
                short(one.tokens),
                "-" if one.loss is None else f"{one.loss:.4f}",
                "-" if one.tokens_per_second is None else short(one.tokens_per_second),
                "-" if one.left_seconds is None or over else duration(one.left_seconds),
                "-" if one.checkpoint is None else f"{one.checkpoint:,}",
            )
        )
    return rows


def _training_state(overview: Overview, step: Step) -> str:
    situation, one = overview.situations[step.name], overview.trainings[step.run]
    element = next((element for element in overview.elements if step.name in element.steps), None)
    words = {"made": "done", "queued": "pending", "held": "held", "open": "pending"}
    if situation in ("queued", "held") and one.attempt:
        word = "preempted" if one.ended in (None, "preempted") else one.ended
    elif situation in ("open", "started") and one.ended:  # without SLURM
        word = one.ended
    else:
        word = words.get(situation, situation)
    restarts = element.state.restarts if element and element.state else 0
    further = f", attempt {one.attempt}" if one.attempt > 1 else ""
    return f"{word}{further}{f', requeued {restarts}x' if restarts else ''}"


def measuring_rows(overview: Overview) -> list[Row]:
    """Return a row per run and kind of step, with a mark for every checkpoint."""
    groups: dict[tuple[str, str], list[Step]] = {}
    for step in overview.steps:
        if step.kind != "train":
            groups.setdefault((step.run or "-", step.kind), []).append(step)
    rows: list[Row] = []
    for (run, kind), steps in groups.items():
        counts = Counter(overview.situations[step.name] for step in steps)
        others = _others(counts).removeprefix("; ")
        rows.append(
            (run, kind, f"{counts['made']}/{len(steps)}", _marks(overview, steps), others or "-")
        )
    return rows


def _marks(overview: Overview, steps: list[Step]) -> str:
    """Return a mark per model, in order; where several share one, the most urgent."""
    by_model: dict[object, list[str]] = {}
    for step in steps:
        by_model.setdefault(step.models or step.name, []).append(overview.situations[step.name])
    models = list(by_model.values())
    size = math.ceil(len(models) / MARKS_PER_ROW)
    bins = [set(chain(*models[start : start + size])) for start in range(0, len(models), size)]
    return "".join(next(mark for word, mark in MARKS.items() if word in found) for found in bins)


def _others(counts: Counter[str]) -> str:
    words = [
        f"{counts[word]:,} {word}" for word in reversed(MARKS) if word != "made" and counts[word]
    ]
    return f"; {', '.join(words)}" if words else ""


def _eta(overview: Overview) -> str:
    if overview.counts["made"] == len(overview.steps):
        return "complete"
    left = least_seconds_left(overview)
    return (
        f"time left unknown: {left}"
        if isinstance(left, str)
        else f"at least {duration(left)} left, without queueing"
    )


def _slow(overview: Overview) -> list[str]:
    """Return the notes on trainings that are not done."""
    done = {
        step.run
        for step in overview.steps
        if step.kind == "train" and overview.situations[step.name] == "made"
    }
    return [
        f"note {run}: {note}"
        for run, one in overview.trainings.items()
        if run not in done
        for note in one.notes
    ]


def _restarted(overview: Overview) -> list[str]:
    """Return lines on elements that were requeued and have not ended."""
    waiting = [
        one
        for one in overview.elements
        if one.situation in ALIVE and one.state and one.state.restarts
    ]
    return _limited(waiting, _restart)


def _restart(element: Element) -> list[str]:
    assert element.state
    assert element.log
    error = last_error(element.log, of_last_start=False) or "no error in its log"
    return [
        f"requeued {element.state.restarts}x {element.name} ({element.id}), {element.situation};"
        f" {error}"
    ]


def _failures(overview: Overview) -> list[str]:
    """Return lines on failed elements with logs, and on cancelled ones by array and reason."""
    failed = [one for one in overview.elements if one.situation == "failed"]
    gone = [one for one in overview.elements if one.situation == "cancelled" and one.steps]
    groups = Counter(
        (one.array, one.state.reason if one.state else "before it started") for one in gone
    )
    cancelled = [
        f"cancelled {array}: {count:,} elements ({reason})"
        for (array, reason), count in groups.items()
    ]
    return [*_limited(failed, _failure), *cancelled]


def _failure(element: Element) -> list[str]:
    state, steps = element.state, element.steps or ("settling",)
    said = (
        f"{state.state}, {state.reason}, exit code {state.exit_code}"
        if state
        else "SLURM says nothing of it"
    )
    where = f" on {state.nodes}" if state and state.nodes else ""
    more = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
    error = last_error(element.log) if element.log else None
    return [
        f"failed {element.name} ({element.id}): {said}{where}; {steps[0]}{more}",
        f"  log {element.log}",
        f"  {error or 'no line of it begins with error:'}",
    ]


def _limited(elements: list[Element], lines: Callable[[Element], list[str]]) -> list[str]:
    """Return the lines of the first elements, and how many there are beyond."""
    found = [line for element in elements[:ELEMENTS_SHOWN] for line in lines(element)]
    more = len(elements) - ELEMENTS_SHOWN
    return [
        *found,
        *([f"and {more:,} more; 'python -m slurm logs NAME' lists them"] if more > 0 else []),
    ]


def duration(seconds: float) -> str:
    """Write a duration as SLURM does.

    >>> [duration(seconds) for seconds in (75, 93784)]
    ['0:01:15', '1-02:03:04']
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (
        f"{days}-{hours:02d}:{minutes:02d}:{rest:02d}"
        if days
        else f"{hours}:{minutes:02d}:{rest:02d}"
    )


def short(number: float) -> str:
    """Write a number with three digits.

    >>> [short(number) for number in (0, 60_000, 999_900, 350.2e9)]
    ['0', '60K', '1M', '350B']
    """
    for unit in ("", "K", "M", "B"):
        if number < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


def clean(line: str) -> str:
    """Replace what could steer the terminal."""
    return "".join(character if character.isprintable() else "?" for character in line)


def plain(content: Shown) -> str:
    """Write columns of fixed width without colours: the same study gives the same bytes."""
    lines = list(content.first)
    for heading, *rows in content.tables:
        widths = [
            max(len(row[column]) for row in (heading, *rows)) for column in range(len(heading))
        ]
        lines.append("")
        for row in (heading, *rows):
            lines.append(
                "  ".join(
                    cell.ljust(width) for cell, width in zip(row, widths, strict=True)
                ).rstrip()
            )
    return "\n".join(clean(line) for line in (*lines, "", *content.last)) + "\n"


def print_shown(content: Shown, console: Console) -> None:
    """Print to a terminal."""
    for line in content.first:
        console.print(Text(clean(line)))
    for heading, *rows in content.tables:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in heading:
            wraps = column in WRAPPED
            table.add_column(
                column, no_wrap=not wraps, min_width=9 if wraps else None, overflow="fold"
            )
        for row in rows:
            table.add_row(*(Text(clean(cell)) for cell in row))
        console.print(table)
    for line in content.last:
        style = (
            "red"
            if line.startswith("failed")
            else "yellow"
            if line.startswith(("note", "requeued"))
            else ""
        )
        console.print(Text(clean(line), style), soft_wrap=True)  # a path can be copied
