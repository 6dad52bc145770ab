"""slurm.cluster against a real SLURM, and its reading of a sacct that kept accounts."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from base.errors import UserError
from slurm import cluster
from slurm.cluster import JobState, TornError, parse_sacct, parse_squeue
from tests.runs import PROJECT
from tests.slurm.wrapped import SWALLOWED, WRAPPERS, wrap
from tests.waiting import wait_until


@pytest.fixture
def submit(lab, tmp_path, request):
    """`submit(lines, **options)`: the id of a job of bash, cancelled when the test ends."""
    jobs: list[int] = []

    def submit_lines(lines: str, array: str = "0", extra=(), token: str = "t") -> int:
        script = write(tmp_path / f"{request.node.name} {len(jobs)}.sh", lines, *extra)
        jobs.append(cluster.submit(script, array, token))
        return jobs[-1]

    yield submit_lines
    cluster.cancel([str(job) for job in jobs])


def write(path: Path, lines: str, *extra: str) -> Path:
    """A script with options of sbatch; of one given twice the last counts."""
    options = (f"--output={path.parent}/log-%A_%a", f"--job-name={path.stem[:20]}", *extra)
    head = "".join(f"#SBATCH {shlex.quote(option)}\n" for option in options)
    path.write_text(f"#!/bin/bash\n{head}{lines}\n")
    return path


def wait_for(expected: dict[str, str]) -> dict[str, JobState]:
    """The elements when each of `expected` has its state."""

    def reached() -> bool:
        known = cluster.states(expected)
        return all(
            element in known and known[element].state == state
            for element, state in expected.items()
        )

    try:
        wait_until(reached, f"{expected}")
    except TimeoutError as error:
        raise AssertionError(f"{error}: {cluster.states(expected)}") from None
    return cluster.states(expected)


def test_array_ends_as_its_elements_do(submit):
    job = submit(
        "[ $SLURM_ARRAY_TASK_ID = 1 ] && exit 3\n[ $SLURM_ARRAY_TASK_ID = 2 ] && kill -9"
        " $$\nexit 0",
        array="0-2",
    )
    known = wait_for({f"{job}_0": "COMPLETED", f"{job}_1": "FAILED", f"{job}_2": "FAILED"})
    assert [known[f"{job}_{index}"].exit_code for index in range(3)] == ["0:0", "3:0", "0:9"]
    assert known[f"{job}_1"].reason == "NonZeroExitCode"
    assert cluster.expand(known[f"{job}_0"].nodes)[0] in cluster.expand("node[1-4]")
    assert known[f"{job}_0"].restarts == 0


def test_a_job_is_found_by_the_token_of_its_call(submit):
    first = submit("exit 0", token="quantdyn:1", extra=["--begin=now+1hour"])
    second = submit("exit 0", array="0-2", token="quantdyn:2", extra=["--begin=now+1hour"])
    assert cluster.job_of("quantdyn:1") == first
    assert cluster.job_of("quantdyn:2") == second
    assert cluster.job_of("quantdyn:3") is None


@pytest.mark.parametrize("name", ["notes", "no id", "one of several clusters"])
def test_the_id_of_a_job_is_found_however_sbatch_is_wrapped(submit, tmp_path, monkeypatch, name):
    commands = wrap(tmp_path / "bin", {"sbatch": WRAPPERS[name]["sbatch"]})
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    job = submit("exit 0", token=f"quantdyn:{name[-2:]}", extra=["--begin=now+1hour"])
    assert cluster.states([f"{job}_0"])[f"{job}_0"].waits


def test_however_lists_are_wrapped_no_element_is_in_another_state(submit, tmp_path, monkeypatch):
    job = submit("exit 0", array="0-2", extra=["--begin=now+1hour"])
    elements = [f"{job}_{index}" for index in range(3)]
    cluster.cancel([elements[1]])
    known = cluster.states(elements)
    assert list(known) == [elements[0], elements[2]]
    monkeypatch.setattr(cluster, "TRY_SECONDS", 0.0)
    for name, lines in WRAPPERS.items():
        with monkeypatch.context() as environment:
            commands = wrap(tmp_path / name, lines)
            environment.setenv("PATH", f"{commands}:{os.environ['PATH']}")
            for _ in range(4):
                listed = cluster.states(elements)
                assert all(state.waits for state in listed.values()), name
                assert listed.keys() <= known.keys(), name
                assert listed.keys() == known.keys() or "empty" in name or "without an" in name
                assert cluster.gone(elements[:1]) == set(), name


def test_what_is_gone_is_what_slurm_says_that_it_does_not_have(submit, tmp_path, monkeypatch):
    """An answer without an element says so twice, an empty one never."""
    job = submit("exit 0", array="0-2", extra=["--begin=now+1hour"])
    cluster.cancel([f"{job}_1"])
    elements = [f"{job}_1", "999999_0", "999998_1"]
    assert cluster.states(elements) == {}
    assert cluster.gone(elements) == set(elements)
    assert cluster.gone([f"{job}_0", f"{job}_1"]) == {f"{job}_1"}
    for lines in ("exit 0", '[ $((n % 2)) = 0 ] || slurm "$@"', SWALLOWED):
        with monkeypatch.context() as environment:
            commands = wrap(tmp_path / f"bin{len(lines)}", {"squeue": lines})
            environment.setenv("PATH", f"{commands}:{os.environ['PATH']}")
            assert cluster.gone(["999999_0"]) == set()


def test_elements_are_cancelled_alone(submit):
    job = submit("exit 0", array="0-3", extra=["--begin=now+1hour"])
    cluster.cancel([f"{job}_0", f"{job}_2", "999999_1"])
    known = cluster.states([f"{job}_{index}" for index in range(4)])
    assert {name for name, state in known.items() if state.waits} == {f"{job}_1", f"{job}_3"}


def test_a_requeued_element_is_one_more_start(submit, lab, tmp_path):
    job = submit(f"echo x >> {tmp_path}/starts$SLURM_ARRAY_TASK_ID; sleep 600", array="0-1")
    both = {f"{job}_0": "RUNNING", f"{job}_1": "RUNNING"}
    wait_for(both)
    starts = tmp_path / "starts1"
    wait_until(lambda: read(starts) == "x\n", "first start")  # RUNNING is before the first line
    lab.command("scontrol", "requeue", f"{job}_1")
    wait_until(lambda: cluster.states(both)[f"{job}_1"].restarts == 1, "requeued")
    known = wait_for(both)
    assert (known[f"{job}_0"].restarts, known[f"{job}_1"].restarts) == (0, 1)
    wait_until(lambda: read(starts) == "x\nx\n", "second start")


def test_inside_a_job_the_calls_mean_the_same(submit, tmp_path):
    new = write(tmp_path / "new.sh", f"env > {tmp_path}/new$SLURM_ARRAY_TASK_ID.env; sleep 600")
    caller = tmp_path / "caller.py"
    caller.write_text(
        "from pathlib import Path; from slurm import cluster\n"
        f"job = cluster.submit(Path({str(new)!r}), '0-1', 'quantdyn:in')\n"
        "cluster.cancel([f'{job}_0']); print(cluster.states([f'{job}_1']))\n"
        "assert cluster.job_of('quantdyn:in') == job\n"
        f"Path({str(tmp_path)!r}, 'job').write_text(str(job))\n"
    )
    leaking = (
        "SBATCH_PARTITION=nope SBATCH_ARRAY_INX=7-9 SQUEUE_STATES=FAILED SQUEUE_PARTITION=urgent"
        " SCANCEL_STATE=FAILED"
    )
    submit(
        f"export PYTHONPATH={PROJECT} {leaking}; {sys.executable} {caller} > {tmp_path}/said 2>&1;"
        " sleep 600",
        extra=["--ntasks=1", "--gpus-per-task=1", "--mem-per-cpu=20"],
    )
    wait_until((tmp_path / "job").exists, "the job's own job")
    job = int((tmp_path / "job").read_text())
    wait_for({f"{job}_1": "RUNNING"})
    wait_until(lambda: "SLURM_JOB_ID" in read(tmp_path / "new1.env"), "its environment")
    variables = dict(
        line.split("=", 1)
        for line in read(tmp_path / "new1.env").splitlines()
        if line.startswith("S")
    )
    assert variables["SLURM_ARRAY_JOB_ID"] == str(job)
    leaked = {"SLURM_GPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NPROCS", "SBATCH_PARTITION"}
    assert not variables.keys() & leaked
    cluster.cancel([str(job)])


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_states_of_many_elements_and_of_none(submit):
    # what SLURM cuts off where it prints them in one line
    squares = [index * index for index in range(70)]
    later = ["--begin=now+1hour"]
    many = submit("exit 0", array="0-4999", extra=later)
    some = submit("exit 0", array=",".join(map(str, squares)), extra=later)
    elements = [f"{many}_{index}" for index in range(5000)]
    elements += [f"{some}_{index}" for index in squares]
    start = time.process_time()
    known = cluster.states([*elements, "999999_0"])
    assert time.process_time() - start < 2  # of this process alone, whatever else the machine does
    assert list(known) == elements
    assert {state.waits for state in known.values()} == {True}
    assert cluster.states(["999999_0"]) == cluster.states([]) == {}


def test_what_slurm_refuses_is_said_in_one_line(lab, tmp_path):
    script = write(tmp_path / "any.sh", "exit 0")
    cluster.check(script)
    for option, message in {
        "--partition=nope": "Invalid partition name specified; correct the site file",
        "--time=31-0": "Requested time limit is invalid .*; correct the site file",
        "--constraint=nope": "Invalid feature specification; correct the site file",
        "--mem=99G": "Memory specification can not be satisfied; .*; correct the site file",
        "--array=0-6001": "Invalid job array specification; make arrays smaller",
        "--exclude=nope": "Invalid node name specified; correct the site file",
    }.items():
        refused = write(tmp_path / "refused.sh", "exit 0", option)
        indices = option[8:] if option.startswith("--array=") else "0"
        with pytest.raises(UserError, match=message) as error:
            cluster.submit(refused, indices, "t")
        assert "\n" not in str(error.value)
        if option in ("--partition=nope", "--time=31-0", "--array=0-6001"):
            with pytest.raises(UserError, match=message):
                cluster.check(refused)


def test_what_the_cluster_is(lab):
    assert cluster.max_array_size() == 6001
    with pytest.raises(UserError, match=r"^scontrol: Partition gpu not found; correct the site"):
        cluster.partitions("gpu")


@pytest.mark.parametrize(
    "nodes",
    [
        *("", "login", "node1,node1", "node[01-03,7],gpu-1-ib,gpu-2-ib", "a[098-102,5]b[1-2],a-0"),
        *("r[1-2,4]n[01-02],r[5]n[8-11],n-[9-10]", "rack[1-2]n[1-3],gpu_a100.local"),
    ],
)
def test_lists_of_nodes_are_read_as_slurm_does(slurm_installed, nodes):
    command = ["scontrol", "show", "hostnames", *filter(None, [nodes])]
    environment = {key: value for key, value in os.environ.items() if key != "SLURM_JOB_NODELIST"}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert cluster.expand(nodes) == (shown.stdout.split() if nodes else [])
    assert nodes == "" or shown.stdout


def test_what_is_no_list_of_nodes_is_said():
    for text in ("a[1", "a[x]", "a]", "a,,b", "a[1-]"):
        with pytest.raises(UserError, match="is not a list of nodes"):
            cluster.expand(text)


def test_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not on PATH; run this on a login node"):
        cluster.submit(tmp_path / "any.sh", "0", "t")


# What sacct 22.05.8 printed (times are shortened) where slurmdbd ran and MinJobAge was 5 s. Of
# array 1, element 3 had requeued itself, 5 had done so held, and 4 was cancelled. 2 was submitted
# as 0-30:2,77-90%3, and 2_4 then cancelled.
RECORDED = """\
normal|3|COMPLETED|None|node1|55|0:0|
normal|1_1|FAILED|None|node1|55|3:0|
normal|1_2|FAILED|None|node1|55|0:9|
normal|1_3|REQUEUED|None|node1|55|0:0|
normal|1_4|CANCELLED by 0|None|node1|55|0:0|
normal|1_5|REQUEUED|JobHeldUser|node1|55|0:0|
normal|2_[0,2,6,8,10,12,14,16,18,20,22,24,26,28,30,77-90%3]|PENDING|JobHeldUser|None assigned|55|0:0|
normal|1_3|COMPLETED|BeginTime|node1|56|0:0|
normal|1_5|PENDING|JobHeldUser|None assigned|56|0:0|
normal|17_[0-300:2%3]|PENDING|JobHeldUser|None assigned|103|0:0|
"""


def test_accounts_are_read_as_recorded():
    known = parse_sacct(RECORDED)
    assert known["3"] == JobState("COMPLETED", "None", "node1", 0, "0:0")
    assert [known[f"1_{index}"].exit_code for index in (1, 2, 5)] == ["3:0", "0:9", None]
    assert known["1_3"] == JobState("COMPLETED", "BeginTime", "node1", 1, "0:0")
    assert known["1_4"].state == "CANCELLED"
    assert known["1_5"] == JobState("PENDING", "JobHeldUser", "", 1, None)
    assert parse_sacct("".join(reversed(RECORDED.splitlines(keepends=True)))) == known
    waiting = {f"2_{index}" for index in [*range(0, 31, 2), *range(77, 91)] if index != 4}
    waiting |= {f"17_{index}" for index in range(0, 301, 2)}
    assert known.keys() == waiting | {"3", "1_1", "1_2", "1_3", "1_4", "1_5"}


def processes(word: Path) -> list[str]:
    """Command lines on this machine, those of all nodes included, that contain `word`."""
    listed = subprocess.run(
        ["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True
    )
    return [line for line in listed.stdout.splitlines() if str(word) in line]


@pytest.mark.parametrize("accounting", [False, True])
def test_no_process_outlives_whoever_started_the_lab(slurm_installed, lab_directory, accounting):
    """Killed with -9, while a job runs that has left its session."""
    directory = lab_directory.parent
    script = write(
        directory / "stays.sh", f"setsid bash -c 'sleep 600; echo {directory}' & sleep 600"
    )
    starts = (
        "import time; from pathlib import Path; from tests.slurm.lab import Lab, running\n"
        f"new = Lab(Path({str(lab_directory)!r}), nodes=1, accounting={accounting})\n"
        "with running(new) as lab:\n"
        f"    lab.command('sbatch', {str(script)!r}); print('up', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starts], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout
        assert owner.stdout.readline() == "up\n"
        wait_until(
            lambda: any("sleep 600; echo" in line for line in processes(directory)), "the job"
        )
        daemons = ["slurmctld", *["mariadbd", "slurmdbd"] * accounting]
        for name in daemons:
            assert any(name in line for line in processes(directory)), name
        owner.send_signal(signal.SIGKILL)
    wait_until(lambda: not processes(directory), "no process left")


@pytest.mark.stress
def test_lost_nodes_are_replaced_and_their_orphans_go_on(submit, lab, tmp_path):
    job = submit(
        f"while sleep 0.2; do echo $SLURM_RESTART_COUNT >> {tmp_path}/$(hostname); done",
        array="0-1",
    )
    known = wait_for({f"{job}_0": "RUNNING", f"{job}_1": "RUNNING"})
    assert known[f"{job}_0"].nodes == known[f"{job}_1"].nodes == "node1"
    lab.kill_node(1, orphans=True)
    wait_until(
        lambda: all(state.restarts == 1 for state in cluster.states(known).values()), "requeued"
    )
    known = wait_for({f"{job}_0": "RUNNING", f"{job}_1": "RUNNING"})
    assert "node1" not in {state.nodes for state in known.values()}
    size = (tmp_path / "node1").stat().st_size
    wait_until(lambda: (tmp_path / "node1").stat().st_size > size, "an orphan writes")
    lab.kill_node(1)
    wait_until(
        lambda: not [line for line in processes(lab.directory) if "node1" in line],
        "no process of node1 left",
    )
    lab.start_node(1)
    assert lab.inside(1, "hostname") == "node1\n"


SQUEUE = (
    "q|7_0|RUNNING|None|node1|0|0|2031-01-01T08:00:00|\n"
    "q|7_1|FAILED|NonZeroExitCode|n2|1|256|N/A|\n"
)


@pytest.mark.parametrize(
    ("text", "parse"), [(SQUEUE, parse_squeue), (RECORDED, parse_sacct)], ids=["squeue", "sacct"]
)
def test_an_answer_that_is_cut_anywhere_is_torn_or_lacks_elements(text, parse):
    """The rest of a field that is not read, or of the last one, may be a note."""
    lines, known = text.splitlines(), parse(text)
    assert parse(text[:-1]) == known, "the last line is whole without its end"
    for number, line in enumerate(lines):
        before, after = "\n".join([*lines[:number], ""]), "\n".join(["", *lines[number + 1 :], ""])
        for stop in range(line.index("|") + 2, len(line)):
            with pytest.raises(TornError, match="is not one of its lines; look at what"):
                parse(before + line[:stop])
        for start in range(1, len(line)):
            try:
                assert parse(line[start:] + after).keys() <= known.keys()
            except TornError:
                pass
            else:
                assert start <= line.index("|") or start >= len(line) - len("|N/A|")


@pytest.mark.parametrize(
    ("text", "parse"), [(SQUEUE, parse_squeue), (RECORDED, parse_sacct)], ids=["squeue", "sacct"]
)
def test_notes_around_lines_are_none_of_them(text, parse):
    between = "\r\n*** Welcome, 3 nodes are down ***\n| 2 notes |\n\n2026-11-29 down\n"
    assert parse(f"cluster 4{text.replace('\n', between)}bye") == parse(text)


# As squeue(1) explains them: the job's resources are given back, or never were taken.
OVER = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED TIMEOUT"
NOT_OVER = "COMPLETING CONFIGURING PENDING REQUEUED RESIZING RUNNING STOPPED SUSPENDED"


def test_what_has_ended_by_the_word_for_its_state():
    words = enumerate([*OVER.split(), *NOT_OVER.split()])
    states = parse_squeue("".join(f"q|{job}|{word}|None|n1|0|0|N/A|\n" for job, word in words))
    assert [state.state for state in states.values() if state.has_ended] == OVER.split()


def test_a_line_with_more_indices_than_slurm_has_is_torn():
    with pytest.raises(TornError):
        parse_squeue(SQUEUE + "q|7_[0-99999999]|PENDING|None||0|0|N/A|\n")


def test_a_torn_answer_is_asked_again_then_said(monkeypatch):
    answers = [SQUEUE[:-5], SQUEUE]
    asked = []

    def run(*words, **_):
        asked.append(words[0])
        return subprocess.CompletedProcess(
            words, 0, answers[0] if len(asked) == 1 else answers[1], ""
        )

    monkeypatch.setattr(cluster, "_run", run)
    monkeypatch.setattr(cluster, "TRY_SECONDS", 0.0)
    assert cluster.states(["7_0", "7_1"])["7_1"].exit_code == "1:0"
    assert asked == ["squeue", "squeue"]
    answers[1] = answers[0]
    with pytest.raises(UserError, match=r"squeue answered 'q\|7_1"):
        cluster.states(["7_0", "7_1"])
    assert len(asked) == 2 + cluster.TRIES
