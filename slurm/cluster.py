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
from functools import partial
from pathlib import Path

from base.errors import UserError
from slurm.states import (
    SACCT,
    SQUEUE,
    JobState,
    TornError,
    parse_sacct,
    parse_squeue,
    whole_lines,
)

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
