"""The lines of `python -m slurm status`: the same study gives the same bytes.

With --watch they are printed again and again, and what can start is submitted each time.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from base.aligned import aligned
from base.errors import UserError, printable
from slurm.cluster import elements_text
from slurm.status.overview import MARKS, ElementStatus, Hours, Overview, Situation, last_error, look
from slurm.submission.advance import advance
from study.step import Step
from study.trainings import PROGRESS, short

Row = tuple[str, ...]

# Without --all, so that a study of any size is a screen.
ELEMENTS_SHOWN, TRAININGS_SHOWN, ROWS_SHOWN = 2, 6, 12
MARKS_PER_ROW = 40
TRAINING = ("training", "state", "logged", *PROGRESS)
MEASURING = ("measuring", "of", "made", "checkpoints", "not made")
IN_SLURM: tuple[Situation, ...] = ("unknown", "running", "held", "queued")


def lines_of(overview: Overview, *, whole: bool = False) -> list[str]:
    """Return counts, what needs a look, and two tables; `whole` with all runs and elements."""
    counts = Counter(overview.situations.values())
    complete, total = counts["made"], len(overview.steps)
    others = _others(counts)
    lines = [
        f"{overview.study.name}: {complete:,}/{total:,} steps made" + (others and f"; {others}")
    ]
    lines += filter(None, [overview.silence, _hours(overview.hours), overview.lost])
    lines += [f"excluded {node}: {reason}" for node, reason in overview.excluded.items()]
    most = len(overview.elements) if whole else ELEMENTS_SHOWN
    lines += [*_failures(overview, most), *_restarted(overview, most), *_stragglers(overview)]
    if overview.trainings:
        rows = training_rows(overview)
        shown = rows if whole else rows[:TRAININGS_SHOWN]
        lines += ["", *aligned([TRAINING, *shown]), *_more(len(rows) - len(shown), "trainings")]
    measuring = measuring_rows(overview)
    if not whole and len(measuring) > ROWS_SHOWN:
        measuring = measuring_rows(overview, by_run=False)
    lines += ["", *aligned([MEASURING, *measuring]), ""]
    legend = ", ".join(f"{mark} {word}" for word, mark in MARKS.items() if counts[word])
    lines.append(f"checkpoints: {legend}")
    return [printable(line) for line in lines]


def _hours(hours: Hours) -> str:
    """Return the line on node-hours and the queue."""
    words = [f"node-hours: {short(hours.used)} used"]
    if hours.expected is not None:
        words.append(f"{short(hours.expected)} more for trainings at their present speed")
    if hours.queued:
        queued = elements_text(hours.queued)
        words.append(f"{queued} queued, the first for {short(hours.waiting_hours)} h")
    if hours.next_start:
        words.append(f"next start expected {hours.next_start}")
    return "; ".join(words)


def training_rows(overview: Overview) -> list[Row]:
    """Return a row per run that is trained here, the most urgent first."""
    rows: list[Row] = []
    runs, urgency = {run.name: run for run in overview.study.trained}, [*MARKS].index
    steps = [step for step in overview.steps if step.kind == "train"]
    for step in sorted(steps, key=lambda step: urgency(overview.situations[step.name])):
        run, training = runs[step.run], overview.trainings[step.run]
        # The age of the log says something of a training at work alone.
        at_work = overview.situations[step.name] == "running"
        logged = training.silent_seconds if at_work else None
        words = "-" if logged is None else f"{logged:.0f} s ago"
        state = _training_state(overview, step)
        rows.append((run.name, state, words, *training.progress(run)))
    return rows


def _training_state(overview: Overview, step: Step) -> str:
    situation, training = overview.situations[step.name], overview.trainings[step.run]
    words = str(situation)
    if training.ending == "diverged" and situation == "made":
        words = "diverged"
    if training.ending and situation in ("held", "queued", "waiting"):
        words = f"{training.ending}, {situation}"
    return f"{words}, attempt {training.attempt}" if training.attempt > 1 else words


def measuring_rows(overview: Overview, *, by_run: bool = True) -> list[Row]:
    """Return a row per kind of step, and run unless all are one, with marks of checkpoints."""
    groups: dict[tuple[str, str], list[Step]] = {}
    for step in overview.steps:
        if step.kind != "train":
            run = step.run or "-" if by_run else "all"
            groups.setdefault((run, step.kind), []).append(step)
    rows: list[Row] = []
    for (run, kind), steps in groups.items():
        counts = Counter(overview.situations[step.name] for step in steps)
        complete = f"{counts['made']}/{len(steps)}"
        rows.append((run, kind, complete, _marks(overview, steps), _others(counts) or "-"))
    return rows


def _marks(overview: Overview, steps: list[Step]) -> str:
    """Return a mark per model, in order; where several share one, the most urgent."""
    by_model: dict[object, list[str]] = {}
    for step in steps:
        by_model.setdefault(step.models or step.name, []).append(overview.situations[step.name])
    models = list(by_model.values())
    # Models share a mark where there are more of them than fit a row.
    size = math.ceil(len(models) / MARKS_PER_ROW)
    bins = [set(chain(*models[start : start + size])) for start in range(0, len(models), size)]
    # MARKS are in order of urgency: the first that occurs is shown.
    return "".join(next(mark for word, mark in MARKS.items() if word in words) for words in bins)


def _others(counts: Counter[Situation]) -> str:
    words = (word for word in reversed(MARKS) if word != "made" and counts[word])
    return ", ".join(f"{counts[word]:,} {word}" for word in words)


def _stragglers(overview: Overview) -> list[str]:
    """Return the slow ranks of trainings that are not done."""
    return [
        f"note {step.run}: {straggler}"
        for step in overview.steps
        if step.kind == "train" and overview.situations[step.name] != "made"
        if (straggler := overview.trainings[step.run].straggler)
    ]


def _restarted(overview: Overview, most: int) -> list[str]:
    """Return lines on elements that are alive after a start that failed."""
    ends = "failed", "cancelled"
    alive = [element for element in overview.elements if element.situation not in ends]
    return _limited([element for element in alive if _earlier_error(element)], most, _restart)


def _earlier_error(element: ElementStatus) -> str | None:
    return last_error(element.log, of_last_start=False) if element.log else None


def _restart(element: ElementStatus) -> list[str]:
    return [f"{element.situation} {element.name} ({element.id}), after {_earlier_error(element)}"]


def _failures(overview: Overview, most: int) -> list[str]:
    """Return lines on failed elements with their logs, and on cancelled ones by array."""
    failed = [element for element in overview.elements if element.situation == "failed"]
    cancelled = Counter(each.array for each in overview.elements if each.situation == "cancelled")
    return _limited(failed, most, _failure) + [
        f"cancelled {array}: {elements_text(count)}; submit again with 'python -m slurm retry'"
        for array, count in cancelled.items()
    ]


def _failure(element: ElementStatus) -> list[str]:
    state, steps = element.state, element.steps
    outcome = "SLURM says nothing of it"
    if state:
        outcome = f"{state.state}, {state.reason}, exit code {state.exit_code}"
        outcome += f" on {state.nodes or '-'}"
    more = f" and {len(steps) - 1} more" if len(steps) > 1 else ""
    error = last_error(element.log) if element.log else None
    return [
        f"failed {element.name} ({element.id}): {outcome}; {steps[0]}{more}",
        f"  log {element.log}",
        f"  {error or 'no line of it begins with error:'}",
    ]


def _limited(
    elements: list[ElementStatus], most: int, lines: Callable[[ElementStatus], list[str]]
) -> list[str]:
    """Return the lines of the first elements, and how many there are beyond."""
    shown = [line for element in elements[:most] for line in lines(element)]
    return shown + _more(len(elements) - most, "elements")


def _more(count: int, what: str) -> list[str]:
    return [f"and {count:,} more {what}; --all lists them"] if count > 0 else []


def watch(study_dir: Path, seconds: int) -> None:
    """Print the status every so many seconds until nothing is to come."""
    while not _is_over(study_dir):
        time.sleep(seconds)
        print()


def _is_over(study_dir: Path) -> bool:
    """Submit what can start and print the status; return whether nothing is to come."""
    _submit(study_dir)
    try:
        overview = look(study_dir)
    except OSError as error:  # such as a mount that is away: another look is to come
        print(f"the study cannot be read: {error}", flush=True)
        return False
    print("\n".join(lines_of(overview)), flush=True)
    if any(element.situation in IN_SLURM for element in overview.elements):
        return False
    # A job may have ended after the first call: then others can start by now.
    return _submit(study_dir) == {}


def _submit(study_dir: Path) -> dict[str, int] | None:
    """Submit what can start; return how many by array, None with a line where that fails."""
    try:
        return advance(study_dir)
    except (UserError, OSError) as error:
        print(f"nothing was submitted: {error}", flush=True)
        return None
