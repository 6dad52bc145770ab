"""The answers of two releases of SLURM, recorded from their daemons in the lab.

`tests/other_slurm.sh` runs all tests of this folder under the second. Alike, where quantdyn asks:
squeue's and sacct's lines but for the rows below, words for states, what refusals say and which
stream has it, exit codes, `sbatch --test-only`, `scontrol show partition|hostnames|config`, the
limit of a QOS, `--signal`, requeues. A state, a reason and a time of a start are words of both.

| asked | 22.05.8 | 24.11.5 |
|---|---|---|
| squeue's exit_code | what waitpid() returned: 768, 9 | as sacct's: 3:0, 0:9 |
| squeue's reason of what a signal killed | JobLaunchFailure | RaisedSignal:9(Killed) |
| sacct's reason of what is held | JobHeldUser | None |
| sacct without slurmdbd, first line | slurm_persist_conn_open_without_init: ... | _open_persist_conn: ... |
| a dependency on a job that is unknown | taken | Job dependency problem |
| `scontrol show config` of a plugin that is none | task/none, jobcomp/none | (null) |
| PriorityType by default | priority/basic | priority/multifactor |
| TresPerNode of `scontrol show job` with GPUs | gres:gpu:2 | gres/gpu:2 |
| a job's environment with --cpus-per-task=2 | SLURM_CPUS_PER_TASK | SLURM_TRES_PER_TASK=cpu=2, too |
| a job's environment besides | SLURM_WORKING_CLUSTER | SLURM_JOB_START_TIME, ..._END_TIME |
| `squeue --states=help` | words in capitals | in small letters |
| an accounts database that is not there | slurmdbd makes it | and ends, with MariaDB 11.8.9 |
"""

import subprocess

import pytest

from slurm import cluster
from slurm.cluster import JobState, parse_sacct, parse_squeue

# An array of a success, exit 3, a kill -9 of itself, a requeue, a scancel and a `requeuehold`; a job
# of `--begin` and those that wait for it; an array with a limit.
SQUEUE = {
    "22.05.8": """\
8|RUNNING|None|node1|0|0|2026-11-29T21:27:32|
1_4|CANCELLED|None|node1|0|15|2026-11-29T21:27:32|
1_3|COMPLETED|None|node1|1|0|2026-11-29T21:27:35|
1_0|COMPLETED|None|node1|0|0|2026-11-29T21:27:32|
1_1|FAILED|NonZeroExitCode|node1|0|768|2026-11-29T21:27:32|
1_2|FAILED|JobLaunchFailure|node1|0|9|2026-11-29T21:27:32|
5|PENDING|BeginTime||0|0|2026-11-29T22:27:32|
7|PENDING|DependencyNeverSatisfied||0|0|N/A|
14_3|PENDING|JobArrayTaskLimit||0|0|N/A|
1_5|PENDING|job requeued in held state||1|0|N/A|
14_1|RUNNING|None|node[1-2]|0|0|2026-11-29T21:27:40|
""",
    "24.11.5": """\
8|RUNNING|None|node1|0|0:0|2026-11-29T21:27:32|
1_4|CANCELLED|None|node1|0|0:15|2026-11-29T21:27:32|
1_3|COMPLETED|None|node1|1|0:0|2026-11-29T21:27:35|
1_0|COMPLETED|None|node1|0|0:0|2026-11-29T21:27:32|
1_1|FAILED|NonZeroExitCode|node1|0|3:0|2026-11-29T21:27:32|
1_2|FAILED|RaisedSignal:9(Killed)|node1|0|0:9|2026-11-29T21:27:32|
5|PENDING|BeginTime||0|0:0|2026-11-29T22:27:32|
14_3|PENDING|JobArrayTaskLimit||0|0:0|N/A|
7|PENDING|DependencyNeverSatisfied||0|0:0|N/A|
1_5|PENDING|job requeued in held state||1|0:0|N/A|
14_1|RUNNING|None|node[1-2]|0|0:0|2026-11-29T21:27:40|
""",
}
# Of the same jobs.
SACCT = """\
8|RUNNING|None|node1|1795987652|0:0
1_0|COMPLETED|None|node1|1795987652|0:0
1_1|FAILED|None|node1|1795987652|3:0
1_2|FAILED|None|node1|1795987652|0:9
1_3|REQUEUED|None|node1|1795987652|0:0
1_4|CANCELLED by 0|None|node1|1795987652|0:0
1_5|REQUEUED|{held}|node1|1795987652|0:0
1_3|COMPLETED|BeginTime|node1|1795987653|0:0
1_5|PENDING|{held}|None assigned|1795987653|0:0
"""
HELD = {"22.05.8": "JobHeldUser", "24.11.5": "None"}
# `sacct` when slurmdbd is down.
NO_DATABASE = {
    "22.05.8": """\
sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to\
 host:localhost:13324: Connection refused
sacct: error: Sending PersistInit msg: Connection refused
sacct: error: Problem talking to the database: Connection refused
""",
    "24.11.5": """\
sacct: error: _open_persist_conn: failed to open persistent connection to host:localhost:10326:\
 Connection refused
sacct: error: Sending PersistInit msg: Connection refused
sacct: error: Problem talking to the database: Connection refused
""",
}
releases = pytest.mark.parametrize("release", SQUEUE)


def asked(lines: str, end: str = "") -> str:
    """The lines as they are asked for by now: a first field that is not read, and "|" at the end."""
    return "".join(f"normal|{line}{end}\n" for line in lines.splitlines())


@releases
def test_squeue_says_the_same(release):
    known = parse_squeue(asked(SQUEUE[release]))
    ended = {name: state.exit_code for name, state in known.items() if state.has_ended}
    assert ended == {"1_0": "0:0", "1_1": "3:0", "1_2": "0:9", "1_3": "0:0", "1_4": "0:15"}
    assert {name for name, state in known.items() if state.waits} == {"5", "7", "14_3", "1_5"}
    assert {name for name, state in known.items() if state.is_held} == {"1_5"}
    assert known["14_1"] == JobState("RUNNING", "None", "node[1-2]", 0, None, "2026-11-29T21:27:40")
    assert known["1_3"].restarts == 1


@releases
def test_sacct_says_the_same(release):
    known = parse_sacct(asked(SACCT.format(held=HELD[release]), "|"))
    ended = {name: state.exit_code for name, state in known.items() if state.has_ended}
    assert ended == {"1_0": "0:0", "1_1": "3:0", "1_2": "0:9", "1_3": "0:0", "1_4": "0:0"}
    assert known["1_5"] == JobState("PENDING", HELD[release], "", 1, None)


@releases
def test_accounts_that_do_not_answer_are_named(release, monkeypatch, capsys):
    """By either release's words, and squeue's answer stands."""

    def run(*words, **_):
        if words[0] == "squeue":
            return subprocess.CompletedProcess(words, 0, asked(SQUEUE[release]), "")
        return subprocess.CompletedProcess(words, 1, "", NO_DATABASE[release])

    monkeypatch.setattr(cluster, "_run", run)
    assert cluster.states(["1_2", "9_0"])["1_2"].exit_code == "0:9"
    said = capsys.readouterr().err
    assert "run again when the accounting service answers; without it only squeue is asked" in said
