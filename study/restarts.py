"""Node-hours that trainings lost to restarts, and the restart interval that would have lost least.

An end counts as a failure where updates had to be made again after it: crashes, lost nodes, hangs,
preemptions without time to save. After a time limit or a preemption that left a save none is made
again, however often training saves, so such an end costs its next start alone.
"""

import math
from collections.abc import Iterable
from itertools import pairwise, zip_longest
from pathlib import Path
from statistics import median
from typing import NamedTuple

from base.statistics import INTERVAL_LEVEL
from train.run.config import RunConfig
from train.run.directory import RunDirectory
from train.run.history import AttemptWork, history, surviving
from train.run.metrics import TRAINED, tail_rows

HOUR = 3600.0
SAVED = "save_stall_seconds"  # by which a save held up training
TAILS_BYTES = (2**16, 2**20, 2**24)  # of metrics, until one shows a save
DIGITS = 2  # of an interval, whose ends are seldom known better


class Losses(NamedTuple):
    """The node-seconds of one run or several.

    Attributes:
        used: of all attempts, from their starts to their last updates.
        lost: of updates that were made again, of starts after the first, and of starts in vain.
        exposed: of updates and saves, in which the failures came.
        failures: ends after which updates were made again.
    """

    used: float = 0.0
    lost: float = 0.0
    exposed: float = 0.0
    failures: int = 0


class Interval(NamedTuple):
    """The best restart interval of a run, with the ends of its 95% interval.

    Attributes:
        seconds: best, low, high.
        updates: the same in updates, as `saving.restart_every_steps` counts.
    """

    seconds: tuple[float, float, float]
    updates: tuple[int, int, int]


def losses_of(works: list[AttemptWork]) -> Losses:
    """Return the losses of a run by the work of its attempts."""
    trained = [work for work in works if work.updates]
    used = lost = exposed = 0.0

    for work, start, kept in zip(works, _starts(works), surviving(works), strict=True):
        used += work.nodes * (start + work.seconds)
        exposed += work.nodes * work.seconds
        # One start is needed in any case: the first that leads to an update.
        lost += 0.0 if trained and work is trained[0] else work.nodes * start
        if work.updates > 1:
            # The time of the first update is in the start.
            again = min(work.updates - kept, work.updates - 1)
            lost += work.nodes * work.seconds * again / (work.updates - 1)

    failures = sum(later.first_step <= earlier.last_step for earlier, later in pairwise(trained))
    return Losses(used, lost, exposed, failures)


def _starts(works: list[AttemptWork]) -> list[float]:
    """Return the seconds of each attempt before its first update.

    When a start without an update ended is not recorded: it counts as long as the others usually
    took, at most until the next one began. One that may still be at it counts nothing yet.
    """
    until_update = [
        max(0.0, work.first_time - work.began)
        for work in works
        if work.updates and work.began is not None
    ]
    usual = median(until_update) if until_update else 0.0
    seconds = []
    for work, following in zip_longest(works, works[1:]):
        if work.began is None:
            seconds.append(0.0)
        elif work.updates:
            seconds.append(max(0.0, work.first_time - work.began))
        elif following and following.began is not None:
            seconds.append(min(usual, max(0.0, following.began - work.began)))
        else:
            seconds.append(0.0)
    return seconds


def between_failures(failures: int, seconds: float) -> tuple[float, float, float]:
    """Return the mean seconds between failures with the ends of its exact interval.

    2 T / M of a Poisson process, seen for T, is bounded by quantiles of chi-square with 2 n degrees
    of freedom above and 2 n + 2 below (Garwood 1936, "Fiducial limits for the Poisson
    distribution").

    Args:
        failures: n, at least 1.
        seconds: T, in which they came.
    """
    from scipy.special import gammaincinv  # half of chi-square's quantile at 2 n degrees

    tail = (1 - INTERVAL_LEVEL) / 2
    high = seconds / float(gammaincinv(failures, tail))
    low = seconds / float(gammaincinv(failures + 1, 1 - tail))
    return seconds / failures, low, high


def best_interval(save_seconds: float, between_seconds: float) -> float:
    """Return the seconds of training between two saves at which saves and failures cost least.

    Young's sqrt(2 C M) (1974, "A first order approximation to the optimum checkpoint interval")
    with the higher terms of Daly (2006, "A higher order estimate of the optimum checkpoint interval
    for restart dumps", FGCS 22(3), equation 37). The time of a restart does not change it.

    Args:
        save_seconds: C, by which a save holds up training.
        between_seconds: M, the mean time between failures.
    """
    ratio = save_seconds / (2 * between_seconds)
    if ratio >= 1:
        return between_seconds
    young = math.sqrt(2 * save_seconds * between_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def interval_of(
    directory: RunDirectory, run: RunConfig, nodes: int, together: Losses
) -> Interval | None:
    """Return the best restart interval of a run; None without a failure or a timed save.

    Failures of all runs `together` give their rate on a node, by which more nodes fail more often.
    """
    seconds = _seconds_of_saves_and_updates(directory, run)
    if not together.failures or seconds is None:
        return None
    save, update = seconds
    between = between_failures(together.failures, together.exposed / nodes)
    best, low, high = (best_interval(save, mean) for mean in between)

    def updates(seconds: float) -> int:
        return max(1, _rounded(seconds / update))

    return Interval((best, low, high), (updates(best), updates(low), updates(high)))


def _seconds_of_saves_and_updates(
    directory: RunDirectory, run: RunConfig
) -> tuple[float, float] | None:
    """Return the median seconds of saves and updates in the newest rows; None where one lacks."""
    for size in TAILS_BYTES:
        rows = tail_rows(directory.metrics, size)
        saves = [row for row in rows if SAVED in row]
        # What a permanent checkpoint adds, averages and evaluation, no restart interval changes.
        restarts = [row for row in saves if row["step"] not in run.save_steps]
        if restarts or (saves and run.saving.restart_every_steps is None):
            break
    updates = [row for row in rows if TRAINED in row and "time" in row]
    steps = [
        later["time"] - earlier["time"]
        for earlier, later in pairwise(updates)
        if later["step"] == earlier["step"] + 1 and later["time"] > earlier["time"]
    ]
    if not saves or not steps:
        return None
    return median(row[SAVED] for row in restarts or saves), median(steps)


def _rounded(number: float) -> int:
    """Return a number to DIGITS digits."""
    return round(float(f"{number:.{DIGITS}g}"))


def lost_to_restarts(directory: Path, runs: Iterable[RunConfig]) -> str | None:
    """Return in words what trainings of a study lost to restarts; None where they lost nothing.

    The interval is that of the run that lost most, which is named where there are several: 'lost to
    restarts: 3.1 node-hours of 40 (2 failures); saving every 120 updates [60, 300] would have lost
    least, now 500'.
    """
    by_name = {run.name: run for run in runs}
    works = {name: history(RunDirectory(directory / name)) for name in by_name}
    if all(len(attempts) < 2 for attempts in works.values()):
        return None  # the usual case, which costs no more than this
    each = {name: losses_of(attempts) for name, attempts in works.items()}
    used, lost, exposed, failures = (sum(column) for column in zip(*each.values(), strict=True))
    if not lost:
        return None

    plural = "" if failures == 1 else "s"
    counted = f"{failures} failure{plural}" if failures else "no failure, so no interval follows"
    words = f"lost to restarts: {_hours(lost)} node-hours of {_hours(used)} ({counted})"
    worst = max(each, key=lambda name: each[name].lost)
    rate = Losses(used, lost, exposed, int(failures))
    nodes, run = works[worst][-1].nodes, by_name[worst]
    interval = interval_of(RunDirectory(directory / worst), run, nodes, rate)
    if interval is None:
        return words
    best, low, high = interval.updates
    named = f"{worst} " if len(by_name) > 1 else ""
    now = run.saving.restart_every_steps or "at permanent checkpoints alone"
    return (
        f"{words}; saving {named}every {best} updates [{low}, {high}] would have lost least,"
        f" now {now}"
    )


def _hours(seconds: float) -> str:
    hours = seconds / HOUR
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
