"""SLURM's own commands, and the only place that starts them.

Never name an element of an array by a plain number: the last one has the array's own, and SLURM
takes that for all of them.
"""

import os
import re
import subprocess
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from base.errors import UserError
from slurm.states import SACCT, SQUEUE, JobState, parse_sacct, parse_squeue

TIMEOUT_SECONDS = 60
WORDS_PER_CALL = 500  # far below what a command line may hold
# Inside a job SLURM_* describe that job; sbatch and, in the new job, srun take them as requests
# (SLURM_TRES_PER_TASK, SLURM_MEM_PER_CPU). The others are options, SBATCH_PARTITION, or change what
# is printed, SQUEUE_STATES.
LEAKING = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SCANCEL|SACCT|SINFO|SCONTROL)_")
KEPT = ("SLURM_CONF", "SLURM_JWT")  # which cluster, and who asks

NEXT_ACTIONS = (  # what SLURM's message says, in lower case: what to do
    (r"configuration (source|file)|cannot stat file", "set SLURM_CONF, or use a login node"),
    (r"database", "run again when the accounting service answers"),
    (r"contact|connect|timed out", "run again when `scontrol ping` finds the controller up"),
    (r"invalid job id|already finished", "the job has ended; look at `squeue -t all`"),
    (r"job array", "make arrays smaller: `scontrol show config` states MaxArraySize"),
    ("", "correct the site file, or ask those who run the cluster"),
)


def sbatch_words(dependency: str | None, hold: bool, array: str | None) -> list[str]:
    """Return sbatch and its options; a dependency that cannot be met cancels the job."""
    words = ["sbatch", "--parsable", *([f"--array={array}"] if array else [])]
    if dependency:  # by default it would wait for ever
        words += [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]
    return words + ["--hold"] * hold


def submit(
    script: Path, *, dependency: str | None = None, hold: bool = False, array: str | None = None
) -> int:
    """Submit a script and return the job's id."""
    words = sbatch_words(dependency, hold, array)
    answer = _answer(*words, str(script.resolve())).strip()
    job, _, _ = answer.partition(";")  # the cluster's name follows where there are several
    if not job.isdecimal():
        raise UserError(
            f"sbatch answered {answer!r:.80} and no job id; look at `squeue --me` before trying"
            " again"
        )
    return int(job)


def check(script: Path) -> None:
    """Raise UserError if SLURM would refuse the script."""
    _answer("sbatch", "--test-only", str(script.resolve()))


def states(ids: Collection[int]) -> dict[str, JobState]:
    """Return the elements of these jobs and arrays that SLURM knows, by their names.

    squeue answers for the present and as long after as the site's MinJobAge says, sacct for ever
    where the site keeps accounts. Absent are ids that neither knows, and an element cancelled while
    it and others of its array waited.
    """
    known: dict[str, JobState] = {}
    for batch in _batches([str(job) for job in sorted(set(ids))]):
        jobs = f"--jobs={','.join(batch)}"
        # Times in seconds; no range of indices cut off.
        accounts = _run(*SACCT, jobs, SLURM_TIME_FORMAT="%s", SLURM_BITSTR_LEN="0")
        if accounts.returncode == 0:
            known |= parse_sacct(accounts.stdout)
        elif "storage is disabled" not in accounts.stderr:
            raise _refusal("sacct", accounts.stderr)
        queue = _run(*SQUEUE, jobs)
        if queue.returncode == 0:
            known |= parse_squeue(queue.stdout)
        elif "Invalid job id" not in queue.stderr:  # said of one id that it does not know
            raise _refusal("squeue", queue.stderr)
    return known


def jobs_named(name: str) -> list[int]:
    """Return the ids of this user's jobs of that name that have not ended."""
    found = _answer("squeue", "--me", "--noheader", f"--name={name}", "-O", "ArrayJobID:|").split()
    return sorted({int(word.rstrip("|")) for word in found})


def release(elements: Sequence[str]) -> None:
    """Let held elements start; UserError names one that cannot, the others are released."""
    _each_batch(["scontrol", "release"], elements)


def cancel(elements: Sequence[str]) -> None:
    """Cancel elements, or arrays by their plain id; ignore what has ended or is unknown."""
    _each_batch(["scancel", "--quiet"], elements)


def requeue(element: str, *, held: bool = False) -> None:
    """End the element if it runs and queue it again."""
    _each_batch(["scontrol", "requeuehold" if held else "requeue"], [element])


def exclude(element: str, nodes: Sequence[str]) -> None:
    """Keep a pending element off exactly these nodes, in place of those before."""
    _answer("scontrol", "update", f"JobId={element}", f"ExcNodeList={','.join(nodes)}")


def max_array_size() -> int:
    """Return one more than the largest index of an array."""
    settings = _answer("scontrol", "show", "config")
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", settings, re.MULTILINE)
    assert found, settings
    return int(found[1])


def hostnames(nodelist: str) -> list[str]:
    """Return the nodes of a list such as `node[1-3,7]`."""
    return _answer("scontrol", "show", "hostnames", nodelist).split() if nodelist else []


def _each_batch(command: Sequence[str], elements: Sequence[str]) -> None:
    for batch in _batches(elements):
        assert all(re.fullmatch(r"\d+(_\d+)?", element) for element in batch), batch
        _answer(*command, *batch)


def _batches(words: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(words), WORDS_PER_CALL):
        yield words[start : start + WORDS_PER_CALL]


def _answer(*arguments: str) -> str:
    ended = _run(*arguments)
    if ended.returncode:
        raise _refusal(arguments[0], ended.stderr)
    return ended.stdout


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


def _refusal(command: str, stderr: str) -> UserError:
    """One line: what SLURM said, and what to do about it."""
    lines = [re.sub(r"^s\w+: (error: |fatal: )?", "", line) for line in stderr.splitlines()]
    said = "; ".join(line for line in lines if line.strip()) or "failed without a word"
    action = next(to_do for pattern, to_do in NEXT_ACTIONS if re.search(pattern, said.lower()))
    return UserError(f"{command}: {said}; {action}")
