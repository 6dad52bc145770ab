"""SLURM's own commands, and the only place that starts them.

Never name an element of an array by a plain number: the last one has the array's own, and SLURM
takes that for all of them.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

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
    NAME + r"\|([A-Z_]+)(?: [^|]*)?\|([^|]*)\|([^|]*)\|(\d{1,19})\|(\d{1,10}:\d{1,10})", re.ASCII
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
    # A whole answer ends with a line end, so the rest is empty; any other rest was cut off.
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
        # The fourth field is the time of submission, in seconds since the epoch.
        state, reason, nodes, _, exit_code = max(attempts, key=lambda values: int(values[3]))
        ended_with = exit_code if ENDED.fullmatch(state) else None
        states[element] = JobState(
            state, reason, nodes.replace("None assigned", ""), len(attempts) - 1, ended_with
        )
    return states


def _elements(name: str) -> Iterator[str]:
    """Yield the elements of a name: "123_4", or "123_[4,6-12:2%3]" for pending ones."""
    # After "%" comes a limit of elements at once, which names none.
    array, bracket, indices = name.partition("_[")
    if not bracket:
        yield name
        return
    for part in indices.rstrip("]").partition("%")[0].split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        spanned = range(int(first), int(last or first) + 1, int(step or 1))
        yield from (f"{array}_{index}" for index in spanned)


TIMEOUT_SECONDS = 60
TRIES, TRY_SECONDS = 3, 1.0  # where an answer is torn, as by a busy wrapper of a site
WORDS_PER_CALL = 500  # far below what a command line may hold
# Inside a job SLURM_* describe that job; sbatch and, in the new job, srun take them as requests
# (SLURM_TRES_PER_TASK, SLURM_MEM_PER_CPU). The others are options, SBATCH_PARTITION, or change what
# is printed, SQUEUE_STATES.
LEAKING = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SCANCEL|SACCT|SINFO|SCONTROL)_")
KEPT = ("SLURM_CONF", "SLURM_JWT")  # which cluster, and who asks

LOWER_MAX_QUEUED = "lower limits.max_queued in the site file, or wait until other jobs have ended"
NEXT_ACTIONS = (  # pattern of SLURM's message, in lower case -> what to do next
    (r"configuration (source|file)|cannot stat file", "set SLURM_CONF, or use a login node"),
    (r"submitjob|temporarily unable to accept", LOWER_MAX_QUEUED),
    (r"database", "run again when the accounting service answers"),
    (r"contact|connect|timed out", "run again when `scontrol ping` finds the controller up"),
    (r"invalid job id|already finished", "the job has ended; look at `squeue -t all`"),
    (r"job array", "make arrays smaller: `scontrol show config` states MaxArraySize"),
    ("", "correct the site file, or ask those who run the cluster"),
)


COMMENT_LINE = re.compile(r"(\d{1,10})\|([^|]*)\|.*", re.ASCII)


def sbatch_words(array: str, token: str) -> list[str]:
    """Return sbatch and its options, of which `token` tells this very call from all others."""
    return ["sbatch", "--parsable", f"--array={array}", f"--comment={token}"]


def submit(script: Path, array: str, token: str) -> int:
    """Submit elements of an array and return the job's id.

    Raises:
        SubmitLimitError: the queue is full for this user, account or QOS.
        UserError: SLURM refuses the script, or does not answer.
    """
    answer = _answer(*sbatch_words(array, token), str(script.resolve())).strip()
    job, _, _ = answer.partition(";")  # the cluster's name follows where there are several
    if not re.fullmatch(r"\d{1,10}", job, re.ASCII):
        raise UserError(
            f"sbatch answered {answer!r:.80} and no job id; look at `squeue --me` before trying"
            " again"
        )
    return int(job)


def job_of(token: str) -> int | None:
    """Return the job that the sbatch call of this token made; None without one that SLURM knows."""
    fields = "ArrayJobID:|,Comment:|"
    command = ("squeue", "--me", "--noheader", "--states=all", "-O", fields)
    lines = _whole(lambda: list(whole_lines(_answer(*command), COMMENT_LINE, "squeue")))
    # The token is in the comment of one call alone.
    for line in lines:
        if line[2].strip() == token:
            return int(line[1])
    return None


def check(script: Path) -> None:
    """Raise UserError if SLURM would refuse the script."""
    _answer("sbatch", "--test-only", str(script.resolve()))


def states(elements: Collection[str]) -> dict[str, JobState]:
    """Return the elements, such as "123_4", that SLURM knows.

    squeue answers for the present and as long after as the site's MinJobAge says. sacct adds what
    squeue has forgotten, where the site keeps accounts and its database answers.
    """
    by_element: dict[str, JobState] = {}
    for batch in _batches(_jobs(elements)):
        by_element |= _whole(partial(_queued, batch))
    for batch in _batches(_jobs(set(elements) - by_element.keys())):
        accounts = _whole(partial(_accounted, batch))
        if accounts is None:
            break
        # Where both know an element squeue stays, which tells of the present.
        by_element = accounts | by_element
    return {name: by_element[name] for name in elements if name in by_element}


def _queued(jobs: Sequence[str]) -> dict[str, JobState]:
    """Return the elements of jobs that squeue knows."""
    queue = _run(*SQUEUE, f"--jobs={','.join(jobs)}")
    if queue.returncode == 0:
        return parse_squeue(queue.stdout)
    if "Invalid job id" in queue.stderr:  # its message on one id that it lacks
        return {}
    raise _refusal("squeue", queue.stderr)


def _accounted(jobs: Sequence[str]) -> dict[str, JobState] | None:
    """Return the elements of jobs that sacct knows; None, and say why, if it does not answer.

    It knows none where the site keeps no accounts.
    """
    # Times in seconds; no range of indices cut off.
    option = f"--jobs={','.join(jobs)}"
    accounts = _run(*SACCT, option, SLURM_TIME_FORMAT="%s", SLURM_BITSTR_LEN="0")
    if accounts.returncode == 0:
        return parse_sacct(accounts.stdout)
    if "storage is disabled" in accounts.stderr:
        return {}
    refusal = _refusal("sacct", accounts.stderr)
    print(f"note: {refusal}; without it only squeue is asked", file=sys.stderr)
    return None


def _whole[Answer](ask: Callable[[], Answer]) -> Answer:
    """Return an answer that is whole: a torn one is asked again, TRIES times in all."""
    for _ in range(TRIES - 1):
        try:
            return ask()
        except TornError:
            time.sleep(TRY_SECONDS)
    return ask()


def _jobs(elements: Collection[str]) -> list[str]:
    """Return the ids of the arrays of elements."""
    return sorted({name.partition("_")[0] for name in elements}, key=int)


def cancel(elements: Sequence[str]) -> None:
    """Cancel elements, or arrays by their plain id; ignore what has ended or is unknown.

    Never with --state: `scancel --state=PENDING 123_4` cancels all of array 123.
    """
    for batch in _batches(elements):
        assert all(re.fullmatch(r"\d+(_\d+)?", element) for element in batch), batch
        _answer("scancel", "--quiet", *batch)


def max_array_size() -> int:
    """Return one more than the largest index of an array."""
    settings = _answer("scontrol", "show", "config")
    match = re.search(r"^MaxArraySize\s*=\s*(\d{1,9})$", settings, re.MULTILINE | re.ASCII)
    if match is None:
        raise UserError("`scontrol show config` states no MaxArraySize; run again, or look at it")
    return int(match[1])


def partition(name: str) -> str:
    """Return what SLURM says of a partition; UserError for one that it does not know."""
    return _answer("scontrol", "show", "partition", name)


def hostnames(nodelist: str) -> list[str]:
    """Return the nodes of a list such as `node[1-3,7]`."""
    return _answer("scontrol", "show", "hostnames", nodelist).split() if nodelist else []


def _batches(words: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(words), WORDS_PER_CALL):
        yield words[start : start + WORDS_PER_CALL]


def _answer(*arguments: str) -> str:
    process = _run(*arguments)
    if process.returncode:
        # scontrol names a partition that it does not know on stdout.
        raise _refusal(arguments[0], process.stderr or process.stdout)
    return process.stdout


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        key: value for key, value in os.environ.items() if key in KEPT or not LEAKING.match(key)
    }
    try:
        return subprocess.run(
            arguments,
            env=environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
        )
    except FileNotFoundError:
        reason = "is not on PATH; run this on a login node of a SLURM cluster, or load its module"
    except subprocess.TimeoutExpired:
        reason = (
            f"did not answer within {TIMEOUT_SECONDS} s; run again when `scontrol ping` finds the"
            " controller up and, after sbatch, `squeue --me` does not show the job"
        )
    raise UserError(f"{arguments[0]} {reason}")


class SubmitLimitError(UserError):
    """The queue takes no more jobs of this user now."""


def _refusal(command: str, output: str) -> UserError:
    """Return one line: what SLURM said, and what to do about it."""
    lines = [re.sub(r"^s\w+: (error: |fatal: )?", "", line) for line in output.splitlines()]
    message = "; ".join(line for line in lines if line.strip()) or "failed without a message"
    action = next(to_do for pattern, to_do in NEXT_ACTIONS if re.search(pattern, message.lower()))
    kind = SubmitLimitError if action is LOWER_MAX_QUEUED else UserError
    return kind(f"{command}: {message}; {action}")
