"""Node-hours of a study, and what waits in the queue, by the clocks of the cluster's machines."""

from dataclasses import dataclass

from slurm.status.trainings import Training
from slurm.submission.record import Element, log_of
from slurm.submission.starts import starts_of
from slurm.submission.survey import Survey

HOUR = 3600.0


@dataclass(frozen=True)
class Hours:
    """Node-hours of a study that were used and are expected, and its queue.

    Attributes:
        used: node-hours of all starts.
        expected: node-hours that the rest of the trainings takes at their present speed; None
            while none has a speed.
        queued: elements that wait in the queue.
        waiting_hours: how long the first of them has waited.
        next_start: when SLURM expects the next of them to start; empty where it cannot say.
    """

    used: float
    expected: float | None
    queued: int
    waiting_hours: float
    next_start: str


def hours_of(now: Survey, trainings: dict[str, Training], moment: float) -> Hours:
    """Return the hours of a study at a moment, in seconds since the epoch."""
    jobs_of = now.submission.jobs_of
    used = sum(_used(now, element, moment) for element in jobs_of)
    nodes = now.submission.site.resources_of("train").nodes
    left = [
        training.left_seconds
        for training in trainings.values()
        if training.left_seconds is not None
    ]
    waiting = [element for element, state in now.states.items() if state.waits]
    since = [jobs_of[element][-1].time for element in waiting]
    starts = sorted(now.states[element].starts for element in waiting)
    return Hours(
        used=used / HOUR,
        expected=nodes * sum(left) / HOUR if left else None,
        queued=len(waiting),
        waiting_hours=max(0.0, moment - min(since, default=moment)) / HOUR,
        next_start=next((start for start in starts if start), ""),
    )


def _used(now: Survey, element: Element, moment: float) -> float:
    """Return the node-seconds of an element's starts.

    A start that recorded no end is taken to end when its log was last written.
    """
    seconds = 0.0
    for start in starts_of(now.study_dir, element):
        until = start.get("until")
        state = now.states.get(element)
        if until is None and state and not state.has_ended and not state.waits:
            until = moment
        if until is None:
            log = log_of(now.study_dir, element[0], start["job"])
            until = log.stat().st_mtime if log.exists() else start["time"]
        seconds += start["nodes"] * max(0.0, until - start["time"])
    return seconds
