"""SLURM as sites run it, with slurmdbd and limits, and slurm.cluster against it."""

import subprocess

import pytest

from slurm import cluster
from tests.runs import write_program
from tests.waiting import wait_until


def queue(lab, *words: str) -> int:
    """Return the id of the job that these words of sbatch make."""
    return int(lab.command("sbatch", "--parsable", "--output=/dev/null", *words))


def refusal(*words: str) -> str:
    """Return stderr of a command that has to fail."""
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode != 0, ended.stdout
    return ended.stderr


def in_queue(lab, *jobs: int, states: str = "running,pending,completing") -> set[int]:
    """Return those of these jobs that squeue shows."""
    shown = lab.command("squeue", "--noheader", f"--states={states}", "--format=%A %F")
    return set(map(int, shown.split())) & set(jobs)


def accounts(lab, job: int) -> list[str]:
    """Return states and exit codes of the job's starts, as sacct prints them."""
    words = ("sacct", "-nXPD", f"--jobs={job}", "--format=state,exitcode")
    return lab.command(*words).splitlines()


def test_states_outlive_the_memory_of_slurmctld(accounting_lab, tmp_path):
    lab = accounting_lab
    lines = """#!/bin/bash
    case $SLURM_ARRAY_TASK_ID$SLURM_RESTART_COUNT in
        1) exit 3 ;;
        2|21) scontrol requeue ${SLURM_ARRAY_JOB_ID}_2; sleep 600 ;;
    esac"""
    array = queue(lab, "--array=0-2", str(write_program(tmp_path / "array.sh", lines)))
    held_jobs = [queue(lab, "--hold", "--wrap=exit 0") for _ in range(2)]
    lab.command("scancel", str(held_jobs[0]))
    waiting = queue(lab, "--hold", "--array=0-1", "--wrap=exit 0")
    lab.command("scancel", f"{waiting}_1")

    wait_until(lambda: not in_queue(lab, array, held_jobs[0], states="all"), "squeue forgets")
    elements = [f"{array}_{index}" for index in range(3)] + [f"{waiting}_0", f"{waiting}_1"]
    known = cluster.states([*elements, *map(str, held_jobs)])
    ended = {name: (state.state, state.exit_code, state.restarts) for name, state in known.items()}
    assert ended == {
        f"{array}_0": ("COMPLETED", "0:0", 0),
        f"{array}_1": ("FAILED", "3:0", 0),
        f"{array}_2": ("COMPLETED", "0:0", 2),
        f"{held_jobs[0]}": ("CANCELLED", "0:0", 0),
        f"{held_jobs[1]}": ("PENDING", None, 0),
        # Of its array's other element, cancelled while both waited, SLURM leaves no trace at all.
        f"{waiting}_0": ("PENDING", None, 0),
    }
    assert known[f"{array}_1"].nodes in ("node1", "node2")
    assert known[f"{held_jobs[0]}"].nodes == ""


def test_limit_of_submitted_jobs_refuses_a_whole_array(accounting_lab, tmp_path):
    lab = accounting_lab
    any_script = write_program(tmp_path / "any.sh", "#!/bin/bash\nexit 0\n")
    lab.limit_submissions(4)
    try:
        queue(lab, "--hold", "--array=0-2", str(any_script))
        with pytest.raises(cluster.SubmitLimitError, match=r"lower limits\.max_queued") as error:
            cluster.submit(any_script, "0-1", "token")
        assert "\n" not in str(error.value)
        assert len(lab.command("squeue", "--noheader", "--array").splitlines()) == 3
        queue(lab, "--hold", str(any_script))  # the fourth
        assert "QOSMaxSubmitJobPerUserLimit" in refusal("sbatch", "--hold", str(any_script))
    finally:
        lab.limit_submissions(-1)
    assert cluster.submit(any_script, "0-1", "token")


def test_jobs_go_on_while_slurmdbd_is_down(accounting_lab, tmp_path, capsys):
    """The accounts of what happened meanwhile are complete afterwards."""
    lab = accounting_lab
    go = tmp_path / "go"
    job = queue(lab, f"--wrap=until [ -e {go} ]; do sleep 0.1; done; exit 7")
    wait_until(lambda: accounts(lab, job) == ["RUNNING|0:0"], "in the accounts")

    lab.stop_accounting()
    try:
        assert "Connection refused" in refusal("sacct")
        assert in_queue(lab, job)
        assert cluster.states([str(job), "999999_0"])[str(job)].state == "RUNNING"
        assert capsys.readouterr().err.startswith("note: sacct: ")
        later = queue(lab, "--wrap=exit 0")  # limits are enforced from slurmctld's own copy
        go.touch()
        wait_until(lambda: not in_queue(lab, job, later), "both ended")
    finally:
        lab.start_accounting()

    wait_until(lambda: accounts(lab, job) == ["FAILED|7:0"], "told of the first")
    wait_until(lambda: accounts(lab, later) == ["COMPLETED|0:0"], "told of the second")


def test_jobs_outlive_a_restart_of_the_controller(accounting_lab):
    lab = accounting_lab
    running = queue(lab, "--wrap=sleep 600")
    held_job = queue(lab, "--hold", "--wrap=exit 0")
    wait_until(lambda: cluster.states([str(running)])[str(running)].state == "RUNNING", "start")
    lab.limit_submissions(2)
    try:
        lab.restart_controller()
        known = cluster.states([str(running), str(held_job)])
        assert known[str(running)].state == "RUNNING"
        assert known[str(held_job)].reason == "JobHeldUser"
        assert "QOSMaxSubmitJobPerUserLimit" in refusal("sbatch", "--wrap=exit 0")
    finally:
        lab.limit_submissions(-1)
