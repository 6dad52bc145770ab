"""SLURM's own commands, and the only place that starts them.

An element is one job of an array, "123_4", or a job that is no array, "123". Never name one of an array by a plain
number: the last one has the array's own, and SLURM takes that for all of them.
"""

import os
import re
import subprocess
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from train.command import UserError

TIMEOUT_SECONDS = 60
WORDS_PER_CALL = 500  # far below what a command line may hold
# Inside a job SLURM_* describe that job; sbatch and, in the new job, srun take them as requests (SLURM_TRES_PER_TASK,
# SLURM_MEM_PER_CPU). The others are options, SBATCH_PARTITION, or change what is printed, SQUEUE_STATES.
LEAKING = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SCANCEL|SACCT|SINFO|SCONTROL)_")
KEPT = ("SLURM_CONF", "SLURM_JWT")  # which cluster, and who asks

# "|" ends a field, which else is cut off at 20 characters.
SQUEUE_FIELDS = "JobArrayID:|,State:|,Reason:|,NodeList:|,RestartCnt:|,exit_code:|"
SQUEUE = ("squeue", "--noheader", "--states=all", "--array", "-O", SQUEUE_FIELDS)
SACCT_FIELDS = "JobID,State,Reason,NodeList,Submit,ExitCode"
SACCT = ("sacct", "--noheader", "--parsable2", "--allocations", "--duplicates", "-o", SACCT_FIELDS)
ENDED = re.compile("COMPLETED|FAILED|TIMEOUT|NODE_FAIL|PREEMPTED|CANCELLED|OUT_OF_MEMORY|BOOT_FAIL|DEADLINE")

NEXT_ACTIONS = (  # what SLURM's message says, in lower case: what to do
    (r"configuration (source|file)|cannot stat file", "set SLURM_CONF, or run this on a login node"),
    (r"database", "run again when the accounting service answers; until then `squeue --me` shows the jobs"),
    (r"contact|connect|timed out", "run again when `scontrol ping` finds the controller up"),
    (r"partition name|invalid partition", "correct 'partition' in the site file (there are: {partitions})"),
    (
        r"\baccount\b|\bqos\b|association",
        "correct 'account', 'qos' in the site file (`sacctmgr show assoc` lists yours)",
    ),
    (r"time limit", "lower 'time' in the site file"),
    (r"feature|constraint", "correct 'constraint' in the site file"),
    (r"reservation", "correct 'reservation' in the site file"),
    (r"node name", "correct 'exclude' in the site file"),
    (r"job array", "make arrays smaller: `scontrol show config` states MaxArraySize"),
    (r"gres|node configuration|memory|cpu count", "lower what the site file asks of a node: 'gres', 'mem', nodes"),
    (r"invalid job id|already finished", "the job has ended or is not known any more; look at `squeue -t all`"),
)


@dataclass(frozen=True)
class JobState:
    """What SLURM knows of one element.

    Attributes:
        state: as squeue and sacct spell it: PENDING, RUNNING, COMPLETED, NODE_FAIL, ...
        reason: why it waits or how it ended, such as JobHeldUser or NonZeroExitCode; "None" is SLURM's own word.
        nodes: a node list such as `node[1-2]`, empty while it waits.
        restarts: how often it was requeued.
        exit_code: "code:signal" as sacct writes it, of an element that ended.
    """

    state: str
    reason: str
    nodes: str
    restarts: int
    exit_code: str | None


def submit(
    script: Path,
    *,
    dependency: str | None = None,
    hold: bool = False,
    array: str | None = None,
    extra: Sequence[str] = (),
) -> int:
    """The id of the new job, or array, of this script. With a dependency it is cancelled when that cannot be met."""
    options = ["--parsable", *extra]
    if dependency:
        options += [f"--dependency={dependency}", "--kill-on-invalid-dep=yes"]  # by default it would wait for ever
    options += ["--hold"] * hold + [f"--array={array}"] * (array is not None)
    answer = _answer("sbatch", *options, str(script.resolve())).stdout.strip()
    job, _, _ = answer.partition(";")  # the cluster's name follows where there are several
    if not job.isdecimal():
        raise UserError(f"sbatch answered {answer!r:.80} and no job id; look at `squeue --me` before trying again")
    return int(job)


def check(script: Path, extra: Sequence[str] = ()) -> str:
    """SLURM's verdict on a script, without a job: when and where it would start. UserError if it would be refused."""
    return _without_prefixes(_answer("sbatch", "--test-only", *extra, str(script.resolve())).stderr)


def states(ids: Collection[int]) -> dict[str, JobState]:
    """The elements of these jobs and arrays that SLURM knows, by their names.

    squeue answers for the present and as long after as the site's MinJobAge says, sacct for ever where the site keeps
    accounts. Absent are ids that neither knows, and an element cancelled while it and others of its array waited.
    """
    known: dict[str, JobState] = {}
    for batch in _batches([str(job) for job in sorted(set(ids))]):
        jobs = f"--jobs={','.join(batch)}"
        accounts = _run(*SACCT, jobs, SLURM_TIME_FORMAT="%s", SLURM_BITSTR_LEN="0")  # seconds; no range cut off
        if accounts.returncode == 0:
            known |= parse_sacct(accounts.stdout)
        elif "storage is disabled" not in accounts.stderr:
            raise _refusal("sacct", accounts.stderr)
        queue = _run(*SQUEUE, jobs)
        if queue.returncode == 0:
            known |= parse_squeue(queue.stdout)
        elif "Invalid job id" not in queue.stderr:  # its answer for one id that it does not know, not for several
            raise _refusal("squeue", queue.stderr)
    return known


def jobs_named(name: str) -> list[int]:
    """Ids of this user's jobs of that name that have not ended."""
    found = _answer("squeue", "--me", "--noheader", f"--name={name}", "-O", "ArrayJobID:|").stdout.split()
    return sorted({int(word.rstrip("|")) for word in found})


def release(elements: Sequence[str]) -> None:
    """Lets held elements start. All that can be are released also when UserError names one that cannot."""
    _each_batch(["scontrol", "release"], elements)


def cancel(elements: Sequence[str]) -> None:
    """Cancels elements, or arrays by their plain id; what has ended or is unknown is left as it is."""
    _each_batch(["scancel", "--quiet"], elements)


def requeue(element: str) -> None:
    """Ends the element if it runs and puts it into the queue again."""
    _each_batch(["scontrol", "requeue"], [element])


def requeue_held(element: str) -> None:
    """Ends the element if it runs and puts it into the queue again, held."""
    _each_batch(["scontrol", "requeuehold"], [element])


def exclude(element: str, nodes: Sequence[str]) -> None:
    """Keeps a pending element off exactly these nodes; it replaces what was excluded before."""
    _answer("scontrol", "update", f"JobId={element}", f"ExcNodeList={','.join(nodes)}")


def partitions() -> list[str]:
    """The names of the cluster's partitions."""
    return sorted(set(_answer("sinfo", "--noheader", "--all", "-o", "%R").stdout.split()))


def max_array_size() -> int:
    """One more than the largest index of an array."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", _answer("scontrol", "show", "config").stdout, re.MULTILINE)
    if not found:
        raise UserError("`scontrol show config` states no MaxArraySize; use a cluster whose SLURM has job arrays")
    return int(found[1])


def hostnames(nodelist: str) -> list[str]:
    """The nodes of a list such as `node[1-3,7]`."""
    return _answer("scontrol", "show", "hostnames", nodelist).stdout.split() if nodelist else []


def parse_squeue(text: str) -> dict[str, JobState]:
    """The elements in lines of SQUEUE_FIELDS."""
    known = {}
    for line in text.splitlines():
        name, state, reason, nodes, restarts, status = line.split("|")[:6]
        exit_code = (
            f"{int(status) >> 8}:{int(status) & 127}" if ENDED.fullmatch(state) else None
        )  # as waitpid() returned it
        for element in _elements(name):
            known[element] = JobState(state, reason, nodes, int(restarts), exit_code)
    return known


def parse_sacct(text: str) -> dict[str, JobState]:
    """The elements in lines of SACCT_FIELDS, in which every requeue left a line of its own.

    The line submitted last is the present one. The state of a cancelled element goes on with who did it: cut off.
    """
    lines: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        name, *values = line.split("|")
        for element in _elements(name):
            lines.setdefault(element, []).append(values)
    known = {}
    for element, attempts in lines.items():
        stated, reason, nodes, _, exit_code = max(attempts, key=lambda values: int(values[3]))
        state = stated.split()[0]
        ended_with = exit_code if ENDED.fullmatch(state) else None
        known[element] = JobState(state, reason, nodes.replace("None assigned", ""), len(attempts) - 1, ended_with)
    return known


def _elements(name: str) -> Iterator[str]:
    """The elements that a name stands for: "123_4", or "123_[4,6-12:2%3]" for pending ones, here under a throttle."""
    array, bracket, indices = name.partition("_[")
    if not bracket:
        yield name
        return
    for part in indices.rstrip("]").partition("%")[0].split(","):
        span, _, step = part.partition(":")
        first, _, last = span.partition("-")
        yield from (f"{array}_{index}" for index in range(int(first), int(last or first) + 1, int(step or 1)))


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
    environment = {key: value for key, value in os.environ.items() if key in KEPT or not LEAKING.match(key)}
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
        reason = "is not on PATH; run this on a login node of a SLURM cluster, or load its module first"
    except subprocess.TimeoutExpired:
        reason = f"did not answer within {TIMEOUT_SECONDS} s; run again when `scontrol ping` finds the controller up"
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
    return "; ".join(re.sub(r"^s\w+: (error: |fatal: )?", "", line) for line in stderr.splitlines() if line.strip())
