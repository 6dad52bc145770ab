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
    (
        r"configuration (source|file)|cannot stat file",
        "set SLURM_CONF, or run this on a login node",
    ),
    (
        r"database",
        "run again when the accounting service answers; until then `squeue --me` shows the jobs",
    ),
    (r"contact|connect|timed out", "run again when `scontrol ping` finds the controller up"),
    (
        r"partition name|invalid partition",
        "correct 'partition' in the site file (there are: {partitions})",
    ),
    (
        r"\baccount\b|\bqos\b|association",
        "correct 'account', 'qos' in the site file (`sacctmgr show assoc` lists yours)",
    ),
    (r"time limit", "lower 'time' in the site file"),
    (r"feature|constraint", "correct 'constraint' in the site file"),
    (r"reservation", "correct 'reservation' in the site file"),
    (r"node name", "correct 'exclude' in the site file"),
    (r"job array", "make arrays smaller: `scontrol show config` states MaxArraySize"),
    (
        r"gres|node configuration|memory|cpu count",
        "lower what the site file asks of a node: 'gres', 'mem', nodes",
    ),
    (
        r"invalid job id|already finished",
        "the job has ended or is not known any more; look at `squeue -t all`",
    ),
)


def submit(
    script: Path,
    *,
    dependency: str | None = None,
    hold: bool = False,
    array: str | None = None,
) -> int:
    """Submit a script and return the job's id; a dependency that cannot be met cancels it."""
    options = ["--parsable"]
    if dependency:
        options += [
            f"--dependency={dependency}",
            "--kill-on-invalid-dep=yes",
        ]  # by default it would wait for ever
    options += ["--hold"] * hold + [f"--array={array}"] * (array is not None)
    answer = _answer("sbatch", *options, str(script.resolve())).stdout.strip()
    job, _, _ = answer.partition(";")  # the cluster's name follows where there are several
    if not job.isdecimal():
        raise UserError(
            f"sbatch answered {answer!r:.80} and no job id; look at `squeue --me` before trying"
            " again"
        )
    return int(job)


def check(script: Path) -> str:
    """Return when and where a script would start; UserError if SLURM would refuse it."""
    return _without_prefixes(_answer("sbatch", "--test-only", str(script.resolve())).stderr)


def states(ids: Collection[int]) -> dict[str, JobState]:
    """Return the elements of these jobs and arrays that SLURM knows, by their names.

    squeue answers for the present and as long after as the site's MinJobAge says, sacct for ever
    where the site keeps accounts. Absent are ids that neither knows, and an element cancelled while
    it and others of its array waited.
    """
    known: dict[str, JobState] = {}
    for batch in _batches([str(job) for job in sorted(set(ids))]):
        jobs = f"--jobs={','.join(batch)}"
        accounts = _run(
            *SACCT, jobs, SLURM_TIME_FORMAT="%s", SLURM_BITSTR_LEN="0"
        )  # seconds; no range cut off
        if accounts.returncode == 0:
            known |= parse_sacct(accounts.stdout)
        elif "storage is disabled" not in accounts.stderr:
            raise _refusal("sacct", accounts.stderr)
        queue = _run(*SQUEUE, jobs)
        if queue.returncode == 0:
            known |= parse_squeue(queue.stdout)
        elif (
            "Invalid job id" not in queue.stderr
        ):  # its answer for one id that it does not know, not for several
            raise _refusal("squeue", queue.stderr)
    return known


def jobs_named(name: str) -> list[int]:
    """Return the ids of this user's jobs of that name that have not ended."""
    found = _answer(
        "squeue", "--me", "--noheader", f"--name={name}", "-O", "ArrayJobID:|"
    ).stdout.split()
    return sorted({int(word.rstrip("|")) for word in found})


def release(elements: Sequence[str]) -> None:
    """Let held elements start; UserError names one that cannot, the others are released."""
    _each_batch(["scontrol", "release"], elements)


def cancel(elements: Sequence[str]) -> None:
    """Cancel elements, or arrays by their plain id; ignore what has ended or is unknown."""
    _each_batch(["scancel", "--quiet"], elements)


def requeue(element: str) -> None:
    """End the element if it runs and queue it again."""
    _each_batch(["scontrol", "requeue"], [element])


def requeue_held(element: str) -> None:
    """End the element if it runs and queue it again, held."""
    _each_batch(["scontrol", "requeuehold"], [element])


def exclude(element: str, nodes: Sequence[str]) -> None:
    """Keep a pending element off exactly these nodes, in place of those before."""
    _answer("scontrol", "update", f"JobId={element}", f"ExcNodeList={','.join(nodes)}")


def partitions() -> list[str]:
    """Return the names of the cluster's partitions."""
    return sorted(set(_answer("sinfo", "--noheader", "--all", "-o", "%R").stdout.split()))


def max_array_size() -> int:
    """Return one more than the largest index of an array."""
    found = re.search(
        r"^MaxArraySize\s*=\s*(\d+)", _answer("scontrol", "show", "config").stdout, re.MULTILINE
    )
    if not found:
        raise UserError(
            "`scontrol show config` states no MaxArraySize; use a cluster whose SLURM has job"
            " arrays"
        )
    return int(found[1])


def hostnames(nodelist: str) -> list[str]:
    """Return the nodes of a list such as `node[1-3,7]`."""
    return _answer("scontrol", "show", "hostnames", nodelist).stdout.split() if nodelist else []


def _each_batch(command: Sequence[str], elements: Sequence[str]) -> None:
    for batch in _batches(elements):
        assert all(re.fullmatch(r"\d+(_\d+)?", element) for element in batch), batch
        _answer(*command, *batch)


def _batches(words: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(words), WORDS_PER_CALL):
        yield words[start : start + WORDS_PER_CALL]


def _answer(*arguments: str) -> subprocess.CompletedProcess[str]:
    ended = _run(*arguments)
    if ended.returncode:
        raise _refusal(arguments[0], ended.stderr)
    return ended


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
        reason = (
            "is not on PATH; run this on a login node of a SLURM cluster, or load its module first"
        )
    except subprocess.TimeoutExpired:
        reason = (
            f"did not answer within {TIMEOUT_SECONDS} s; run again when `scontrol ping` finds the"
            " controller up"
        )
        if arguments[0] == "sbatch":
            reason += ", and only if `squeue --me` does not show the job"
    raise UserError(f"{arguments[0]} {reason}")


def _refusal(command: str, stderr: str) -> UserError:
    """One line: what SLURM said, and what to do about it."""
    said = _without_prefixes(stderr) or "failed without a word"
    actions = (action for pattern, action in NEXT_ACTIONS if re.search(pattern, said.lower()))
    action = next(actions, "correct the site file, or ask those who run the cluster")
    if "{partitions}" in action:
        action = action.format(partitions=", ".join(partitions()))
    return UserError(f"{command}: {said}; {action}")


def _without_prefixes(stderr: str) -> str:
    return "; ".join(
        re.sub(r"^s\w+: (error: |fatal: )?", "", line)
        for line in stderr.splitlines()
        if line.strip()
    )
