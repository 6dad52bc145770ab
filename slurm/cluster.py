"""SLURM's own commands, and the only place that starts them.

Never name an element of an array by a plain number: the last one has the array's own, and SLURM
takes that for all of them.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from base.errors import UserError

# "|" ends a field, which else is cut off at 20 characters, and thereby every line. The first field
# is not read: it takes in what a wrapper of the site printed before, without a line end.
QUEUE_FIELDS = "QOS:|,JobArrayID:|,State:|,Reason:|,NodeList:|,RestartCnt:|,exit_code:|,StartTime:|"
SQUEUE = ("squeue", "--noheader", "--states=all", "--array", "-O", QUEUE_FIELDS)
SACCT_FIELDS = "QOS,JobID,State,Reason,NodeList,Submit,ExitCode"
SACCT = ("sacct", "--noheader", "--parsable", "--allocations", "--duplicates", "-o", SACCT_FIELDS)
INDICES = r"\d{1,7}(?:-\d{1,7}(?::[1-9]\d{0,6})?)?"  # an index is below 4,000,001
BRACKET = rf"\[{INDICES}(?:,{INDICES})*(?:%\d{{1,7}})?\]"
NAMES = rf"(?:[^][,]|{BRACKET})+"
TEXT, COUNT = r"\|([^|]*)", r"\|(\d{1,19})"
CODE = r"\|(\d{1,10}(?::\d{1,10})?)"  # with a colon, but for squeue of 22.05
# A job, an element, or "123_[4,6-12:2%3]" of elements that wait, and its state.
BEGIN = rf".*\|(\d{{1,10}}(?:[_+]\d{{1,10}}|_{BRACKET})?)\|([A-Z_]+)"
SQUEUE_LINE = re.compile(rf"{BEGIN}{TEXT}{TEXT}{COUNT}{CODE}{TEXT}\|\s*", re.ASCII)
BY_WHOM = "(?: [^|]*)?"
SACCT_LINE = re.compile(rf"{BEGIN}{BY_WHOM}{TEXT}{TEXT}{COUNT}{CODE}\|\s*", re.ASCII)
PART = re.compile(r"\|\d|\d\|", re.ASCII)  # in what is left of such a line, but in no note
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
    """An answer of SLURM that is not whole."""


def own_lines(text: str, pattern: re.Pattern[str], command: str) -> Iterator[re.Match[str]]:
    """Yield the match of every line but notes of the site; TornError for a part of a line."""
    for line in text.split("\n"):
        if match := pattern.fullmatch(line):
            yield match
        elif PART.search(line):
            problem = f"{command} answered {line!r:.80}, which is not one of its lines"
            raise TornError(f"{problem}; look at what `{command}` prints here, and run again")


def parse_squeue(text: str) -> dict[str, JobState]:
    """Return the elements in lines of QUEUE_FIELDS; TornError if they are not whole."""
    states: dict[str, JobState] = {}
    for line in own_lines(text, SQUEUE_LINE, "squeue"):
        name, state, reason, nodes, restarts, status, starts = line.groups()
        if ":" not in status:  # SLURM 22.05 gives what waitpid() returned, 24.11 what sacct writes
            status = f"{int(status) >> 8}:{int(status) & 127}"
        exit_code = status if ENDED.fullmatch(state) else None
        starts = starts.replace("N/A", "")
        known = JobState(state, reason, nodes, int(restarts), exit_code, starts)
        states |= dict.fromkeys(expand(name), known)
    return states


def parse_sacct(text: str) -> dict[str, JobState]:
    """Return the elements in lines of SACCT_FIELDS, in which every requeue left its own line.

    The line submitted last is the present one. The state of a cancelled element ends with who did
    it: cut off. TornError if the lines are not whole.
    """
    lines: dict[str, list[list[str]]] = {}
    for line in own_lines(text, SACCT_LINE, "sacct"):
        name, *values = line.groups()
        for element in expand(name):
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


def expand(names: str) -> list[str]:
    """Return the names in a list of nodes or elements, without SLURM: nodes of jobs may lack it.

    >>> expand("r[1-2]n[09-10],login"), expand("123_[4,6-10:2%3]")
    (['r1n09', 'r1n10', 'r2n09', 'r2n10', 'login'], ['123_4', '123_6', '123_8', '123_10'])
    """
    if not re.fullmatch(rf"(?:{NAMES}(?:,{NAMES})*)?", names, re.ASCII):
        raise UserError(f"{names!r:.80} is not a list of nodes; look at SLURM_JOB_NODELIST")
    expanded: list[str] = []
    for name in re.findall(NAMES, names, re.ASCII):
        parts = enumerate(re.split(r"\[(.*?)\]", name))  # at odd places those in brackets
        choices = [_numbers(part) if place % 2 else [part] for place, part in parts]
        expanded += map("".join, itertools.product(*choices))
    return expanded


def _numbers(ranges: str) -> Iterator[str]:
    """Yield the numbers of ranges such as "01-03,7", each as wide as the first of its range."""
    # After "%" comes a limit of elements at once, which is none of them.
    for part in ranges.partition("%")[0].split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        spanned = range(int(first), int(last or first) + 1, int(step or 1))
        yield from (f"{number:0{len(first)}}" for number in spanned)


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
    (r"submitjob|temporarily una|queue full|^batch job submission failed: job v", LOWER_MAX_QUEUED),
    (r"database", "run again when the accounting service answers"),
    (r"contact|connect|timed out", "run again when `scontrol ping` finds the controller up"),
    (r"invalid job id|already finished", "the job has ended; look at `squeue -t all`"),
    (r"job array", "make arrays smaller: `scontrol show config` states MaxArraySize"),
    ("", "correct the site file, or ask those who run the cluster"),
)


def sbatch_words(array: str, token: str) -> list[str]:
    """Return sbatch and its options, of which `token` tells this very call from all others."""
    return ["sbatch", "--parsable", f"--array={array}", f"--comment={token}"]


def submit(script: Path, array: str, token: str) -> int:
    """Submit elements of an array and return the job's id.

    Raises:
        SubmitLimitError: the queue is full for this user, account or QOS.
        UserError: SLURM refuses the script, or does not answer.
    """
    answer = _answer(*sbatch_words(array, token), str(script.resolve()))
    # The cluster's name follows where there are several; a site may print lines of its own.
    ids = re.findall(r"^(\d{1,10})(?:;\S*)?\s*$", answer, re.MULTILINE | re.ASCII)
    job = int(ids[-1]) if ids else job_of(token)
    if job is None:
        problem = (
            f"sbatch answered {answer!r:.80} and no job id, and squeue shows none of this call"
        )
        raise UserError(f"{problem}; run again: the job is looked for by the token of its call")
    return job


def job_of(token: str, user: str = "") -> int | None:
    """Return the job that the sbatch call of this token made; None if TRIES answers show none."""
    whose = f"--user={user}" if user else "--me"
    fields = "Partition:|,ArrayJobID:|,Comment:|"
    command = ("squeue", whose, "--noheader", "--states=all", "-O", fields)
    # The token is in the comment of one call alone; other comments may be of any form.
    line = re.compile(rf"\|(\d{{1,10}})\|{re.escape(token)}\|", re.ASCII)
    for left in reversed(range(TRIES)):
        if match := line.search(_answer(*command)):
            return int(match[1])
        if left:
            time.sleep(TRY_SECONDS)
    return None


def can_submit() -> bool:
    """Return whether this machine can: nodes of some sites have srun alone of SLURM's commands."""
    return None not in (shutil.which("squeue"), shutil.which("sbatch"))


def check(script: Path, *options: str) -> None:
    """Raise UserError if SLURM would refuse the script, SubmitLimitError if the queue is full."""
    _answer("sbatch", "--test-only", *options, str(script.resolve()))


def requeue(element: str, seconds: int) -> None:
    """End a running element, which starts again after so many seconds."""
    _answer("scontrol", "requeue", element)
    _answer("scontrol", "update", f"JobId={element}", f"StartTime=now+{seconds}")


def states(elements: Collection[str]) -> dict[str, JobState]:
    """Return the elements, such as "123_4", that SLURM knows.

    squeue answers for the present and as long after as the site's MinJobAge says. sacct adds what
    squeue has forgotten, where the site keeps accounts and its database answers.
    """
    by_element: dict[str, JobState] = {}
    for batch in _batches(_jobs(elements)):
        queue = _whole(partial(_queued, batch))
        by_element |= queue or {}
    for batch in _batches(_jobs(set(elements) - by_element.keys())):
        accounts = _whole(partial(_accounted, batch))
        if accounts is None:
            break
        # Where both know an element squeue stays, which tells of the present.
        by_element = accounts | by_element
    return {name: by_element[name] for name in elements if name in by_element}


def gone(elements: Collection[str]) -> set[str]:
    """Return those of elements, which `states` does not list, that SLURM says it does not have."""
    # Of one job alone, or by an array without it; twice in a row. An empty answer says nothing.
    names: set[str] = set()
    for job in _jobs(elements):
        answers = [_whole(partial(_queued, [job])) for _ in range(2)]
        if {} not in answers:
            listed = set().union(*filter(None, answers))
            names |= {name for name in elements if name.partition("_")[0] == job} - listed
    return names


def _queued(jobs: Sequence[str]) -> dict[str, JobState] | None:
    """Return the elements of jobs that squeue lists; None if it says that it knows none."""
    queue = _run(*SQUEUE, f"--jobs={','.join(jobs)}")
    is_unknown = "Invalid job id" in queue.stderr  # its message on one id that it lacks
    if queue.returncode and not is_unknown:
        raise _refusal("squeue", queue.stderr)
    return parse_squeue(queue.stdout) or (None if is_unknown else {})


def _accounted(jobs: Sequence[str]) -> dict[str, JobState] | None:
    """Return the elements of jobs that sacct knows; None, and say why, if it does not answer."""
    # Times in seconds; no range of indices cut off.
    option = f"--jobs={','.join(jobs)}"
    accounts = _run(*SACCT, option, SLURM_TIME_FORMAT="%s", SLURM_BITSTR_LEN="0")
    if accounts.returncode == 0:
        return parse_sacct(accounts.stdout)
    if "storage is disabled" in accounts.stderr:
        return {}  # the site keeps no accounts
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


def cancel(elements: Sequence[str]) -> bool:
    """Cancel elements, or arrays by their plain id; ignore what has ended or is unknown.

    Return False where they are jobs of another user, and this one may not cancel those.
    Never with --state: `scancel --state=PENDING 123_4` cancels all of array 123.
    """
    for batch in _batches(elements):
        assert all(re.fullmatch(r"\d+(_\d+)?", element) for element in batch), batch
        process = _run("scancel", "--quiet", *batch)
        if "permission denied" in process.stderr:
            return False
        if process.returncode:
            raise _refusal("scancel", process.stderr)
    return True


def max_array_size() -> int:
    """Return one more than the largest index of an array."""
    settings = _answer("scontrol", "show", "config")
    match = re.search(r"^MaxArraySize\s*=\s*(\d{1,9})\s*$", settings, re.MULTILINE | re.ASCII)
    if match is None:
        raise UserError("`scontrol show config` states no MaxArraySize; run again, or look at it")
    return int(match[1])


def partitions(names: str | None) -> dict[str, str]:
    """Return SLURM's lines on partitions such as "a,b" by name; of None on the default one.

    UserError for one that it does not know.
    """
    show = ("scontrol", "--oneliner", "show", "partition")
    if names:
        return {name: _answer(*show, name) for name in names.split(",")}
    lines = [line for line in _answer(*show).splitlines() if " Default=YES " in line]
    return {line.partition(" ")[0].removeprefix("PartitionName="): line for line in lines}


def nodes_in(names: str | None) -> list[dict[str, str]]:
    """Return what SLURM knows of every node of partitions that has ever been up, by its keys."""
    wanted = partitions(names).keys()
    lines = _answer("scontrol", "--oneliner", "show", "node").splitlines()
    nodes = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines]
    # Only a node that was up has told its architecture.
    return [node for node in nodes if "Arch" in node and wanted & {*node["Partitions"].split(",")}]


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
    # Lines that do not begin with the name of a command are notes of the site, beside others.
    ours = r"^(?:s\w+: (?:error: |fatal: )?|(?=s\w+ error: |allocation failure: ))(.*)"
    lines = re.findall(ours, output, re.MULTILINE) or output.splitlines()
    message = "; ".join(line for line in lines if line.strip()) or "failed without a message"
    action = next(to_do for pattern, to_do in NEXT_ACTIONS if re.search(pattern, message.lower()))
    kind = SubmitLimitError if action is LOWER_MAX_QUEUED else UserError
    return kind(f"{command}: {message}; {action}")
