"""The states of elements, as squeue and sacct print them.

An element is one job of an array, "123_4", or a job that is not an array, "123".
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from base.errors import UserError

# "|" ends a field, which else is cut off at 20 characters.
SQUEUE_FIELDS = "JobArrayID:|,State:|,Reason:|,NodeList:|,RestartCnt:|,exit_code:|,StartTime:|"
SQUEUE = ("squeue", "--noheader", "--states=all", "--array", "-O", SQUEUE_FIELDS)
SACCT_FIELDS = "JobID,State,Reason,NodeList,Submit,ExitCode"
SACCT = ("sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", "-o", SACCT_FIELDS)
# A job, an element, or "123_[4,6-12:2%3]" of elements that wait.
INDICES = r"\d{1,7}(?:-\d{1,7}(?::[1-9]\d{0,6})?)?"  # an index is below 4,000,001
NAME = rf"(\d{{1,10}}(?:[_+]\d{{1,10}}|_\[{INDICES}(?:,{INDICES})*(?:%\d{{1,7}})?\])?)"
SQUEUE_LINE = re.compile(
    NAME + r"\|([A-Z_]+)\|([^|]*)\|([^|]*)\|(\d{1,10})\|(\d{1,10})\|([^|]*)\|\s*", re.ASCII
)
SACCT_LINE = re.compile(
    NAME + r"\|([A-Z_]+)(?: [^|]*)?\|([^|]*)\|([^|]*)\|(\d{1,19})\|(\d{1,10}:\d{1,10})",
    re.ASCII,
)
# SLURM 21.08 to 25.11; all others are of jobs that wait, run or are about to end.
ENDED = re.compile(
    "COMPLETED|FAILED|TIMEOUT|NODE_FAIL|PREEMPTED|CANCELLED|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE"
    "|REVOKED|LAUNCH_FAILED|RECONFIG_FAIL"
)
HELD_REASON = re.compile(
    r"Job(Held|Hold)\w*|job requeued in held state|launch failed requeued held"
)
HELD_STATE = re.compile("REQUEUE_HOLD|SPECIAL_EXIT|RESV_DEL_HOLD")
PENDING = re.compile(f"PENDING|REQUEUED|REQUEUE_FED|{HELD_STATE.pattern}")


@dataclass(frozen=True)
class JobState:
    """The state of one element in SLURM."""

    state: str  # as squeue and sacct spell it: PENDING, RUNNING, COMPLETED, NODE_FAIL, ...
    reason: str  # why it waits or how it ended, such as NonZeroExitCode; "None" is SLURM's own word
    nodes: str  # a node list such as `node[1-2]`, empty while it waits
    restarts: int  # how often it was requeued
    exit_code: str | None  # "code:signal" as sacct writes it, of an element that ended
    starts: str = ""  # when it starts, as far as SLURM can say; the local time of the cluster

    @property
    def has_ended(self) -> bool:
        """Return whether it will not run any more."""
        return self.exit_code is not None

    @property
    def waits(self) -> bool:
        """Return whether it has still to start."""
        return PENDING.fullmatch(self.state) is not None

    @property
    def is_held(self) -> bool:
        """Return whether it waits to be released by somebody."""
        match = HELD_REASON.fullmatch(self.reason) or HELD_STATE.fullmatch(self.state)
        return self.waits and match is not None


def elements_text(count: int) -> str:
    """Return a number of elements in words.

    >>> elements_text(1), elements_text(1200)
    ('1 element', '1,200 elements')
    """
    return f"{count:,} element{'s' if count != 1 else ''}"


class TornError(UserError):
    """An answer of SLURM that is not whole, or not its own alone."""


def whole_lines(text: str, pattern: re.Pattern[str], command: str) -> Iterator[re.Match[str]]:
    """Yield the match of every line; TornError for one that does not match, or is cut off."""
    *lines, rest = text.split("\n")
    for line in [*lines, *filter(None, [rest])]:
        match = pattern.fullmatch(line)
        if match is None or line is rest:
            raise TornError(
                f"{command} answered {line!r:.80}, which is not one of its lines; look at what"
                f" `{command}` prints here, and run again"
            )
        yield match


def parse_squeue(text: str) -> dict[str, JobState]:
    """Return the elements in lines of SQUEUE_FIELDS; TornError if they are not whole."""
    states = {}
    for line in whole_lines(text, SQUEUE_LINE, "squeue"):
        name, state, reason, nodes, restarts, status, starts = line.groups()
        ended_with = f"{int(status) >> 8}:{int(status) & 127}"  # as waitpid() returned it
        exit_code = ended_with if ENDED.fullmatch(state) else None
        for element in _elements(name):
            states[element] = JobState(
                state, reason, nodes, int(restarts), exit_code, starts.replace("N/A", "")
            )
    return states


def parse_sacct(text: str) -> dict[str, JobState]:
    """Return the elements in lines of SACCT_FIELDS, in which every requeue left its own line.

    The line submitted last is the present one. The state of a cancelled element ends with who did
    it: cut off. TornError if the lines are not whole.
    """
    lines: dict[str, list[list[str]]] = {}
    for line in whole_lines(text, SACCT_LINE, "sacct"):
        name, *values = line.groups()
        for element in _elements(name):
            lines.setdefault(element, []).append(values)
    states = {}
    for element, attempts in lines.items():
        state, reason, nodes, _, exit_code = max(attempts, key=lambda values: int(values[3]))
        ended_with = exit_code if ENDED.fullmatch(state) else None
        states[element] = JobState(
            state, reason, nodes.replace("None assigned", ""), len(attempts) - 1, ended_with
        )
    return states


def _elements(name: str) -> Iterator[str]:
    """Yield the elements of a name: "123_4", or "123_[4,6-12:2%3]" for pending ones."""
    array, bracket, indices = name.partition("_[")
    if not bracket:
        yield name
        return
    for part in indices.rstrip("]").partition("%")[0].split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        spanned = range(int(first), int(last or first) + 1, int(step or 1))
        yield from (f"{array}_{index}" for index in spanned)
