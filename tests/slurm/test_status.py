"""The words of `status`, of studies that were written by hand and answers that SLURM would give."""

import errno
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from base.errors import UserError
from base.files import write_json
from slurm import cluster
from slurm.site import JobLimits
from slurm.status.overview import last_error, look, situation_of
from slurm.status.table import lines_of, measuring_rows, training_rows, watch
from slurm.submission.arrays import FINAL, arrays_of
from slurm.submission.record import append, log_of, record_end, record_start, write_plan
from slurm.submission.submit import write_scripts
from study.definition import save_study
from study.steps import steps_of
from tests.sealing import write_ending
from tests.slurm.studies import (
    in_state,
    make,
    record_call,
    submitted,
    watched_site,
    watched_study,
    write_attempts,
    write_log,
    write_metrics,
    write_ranks,
)
from train.run.directory import RunDirectory

GOLDEN = Path(__file__).parent / "golden" / "status.txt"
TEXT = ["corpus", "prepare-train", "prepare-held_out", "prepare-calibration"]
FIRST = "lr3e-3-step00000048"
MADE = [*TEXT, "train-lr3e-3", f"export-{FIRST}", "export-lr3e-3-step00000072"]
MADE += [f"quantize-{FIRST}-gptq-b3-g32"]


@pytest.fixture
def study():
    return watched_study()


@pytest.fixture
def study_dir(tmp_path):
    return tmp_path / "small"


@pytest.fixture
def answers(monkeypatch):
    """The states of elements in SLURM, to be filled in; it says that it does not have others."""
    known: dict = {}
    monkeypatch.setattr(cluster, "gone", set)
    monkeypatch.setattr(
        cluster, "states", lambda ids: {name: known[name] for name in ids if name in known}
    )
    return known


@pytest.fixture
def half_way(study_dir, study, answers):
    """One run trained, one in its second attempt; of measurements one made, one failed."""
    submission = submitted(study_dir, study)
    make(study_dir, study, MADE)
    write_metrics(study_dir, "lr3e-3", range(1, 73), attempt=1)
    write_metrics(study_dir, "lr3e-2", range(1, 30), attempt=1)
    write_metrics(study_dir, "lr3e-2", range(10, 31), attempt=2)
    write_ending(RunDirectory(study_dir / "lr3e-3"), "done", 72)
    write_attempts(study_dir, "lr3e-3", 1)
    write_attempts(study_dir, "lr3e-2", 2)
    write_ranks(study_dir, "lr3e-2", 30, 2, [1.0, 1.01, 1.02, 1.5])
    write_json(study_dir / "slurm/excluded.json", {"node7": "GPUs seen: 7, at least 8 expected"})
    elements = submission.element_ids
    answers |= {name: in_state("PENDING", "Priority") for name in elements.values()}
    answers |= {elements["export", index]: in_state("PENDING", "JobHeldUser") for index in (2, 3)}
    answers[elements["train", 1]] = in_state("RUNNING", nodes="node[1-2]", restarts=1)
    answers[elements["quantize-1", 0]] = in_state("FAILED", "NonZeroExitCode", "node3", 2, "2:0")
    answers[elements["quantize-1", 1]] = in_state("RUNNING", nodes="node4")
    answers[elements["quantize-1", 2]] = in_state("CANCELLED", "None", code="0:0")
    preempted = ("== start 0", "slurmstepd: error: *** PREEMPTION ***", "== start 1")
    write_log(study_dir, submission, "train", 1, *preempted)
    failed = ("== start 0", "error: old", "== start 1", "error: new", "bye")
    write_log(study_dir, submission, "quantize-1", 0, *failed)
    return submission


def told_of(study_dir: Path) -> str:
    lines = "\n".join(lines_of(look(study_dir))) + "\n"
    return re.sub(r"[\d.]+( s ago)|[\d.]+K( h\b)", r"N\1\2", lines)  # by this machine's clock


def test_the_whole_output(half_way, study_dir):
    output = told_of(study_dir).replace(str(study_dir.parent), "ROOT")
    assert output == GOLDEN.read_text()


def test_a_large_study_is_a_screen_and_all_of_it_is_there(half_way, study_dir, monkeypatch):
    """With limits below this small study's size, as a large study is above the real ones."""
    monkeypatch.setattr("slurm.status.table.TRAININGS_SHOWN", 1)
    monkeypatch.setattr("slurm.status.table.ROWS_SHOWN", 8)
    overview = look(study_dir)
    lines = lines_of(overview)
    first = lines.index(
        "training  state               logged   step   tokens  loss    tokens/s  left     saved"
    )
    assert lines[first + 2] == "and 1 more trainings; --all lists them"
    assert lines[first + 4 : first + 14] == [
        "measuring  of         made  checkpoints  not made",
        "all        corpus     1/1   #            -",
        "all        prepare    3/3   ###          -",
        "all        export     2/4   ##hh         2 held",
        "all        quantize   1/8   xrcq         2 queued, 2 running, 2 cancelled, 1 failed",
        "all        curvature  0/4   qqqq         4 queued",
        "all        collect    0/1   q            1 queued",
        "all        report     0/1   q            1 queued",
        "all        mirror     0/1   q            1 queued",
        "",
    ]
    whole = lines_of(overview, whole=True)
    assert next(line for line in whole if line.startswith("lr3e-3 ")).split()[1] == "made"
    assert sum(line.startswith(("lr3e-2", "lr3e-3")) for line in whole) == 8


def test_no_log_steers_the_terminal(half_way, study_dir):
    write_log(study_dir, half_way, "quantize-1", 0, "error: x \x1b[2J gone")
    output = told_of(study_dir)
    assert "error: x ?[2J gone" in output
    assert "\x1b" not in output


def test_every_step_is_in_one_situation(half_way, study_dir, study):
    overview = look(study_dir)
    assert sorted(overview.situations) == sorted(step.name for step in steps_of(study))
    made = {name for name, situation in overview.situations.items() if situation == "made"}
    assert made == set(MADE)
    measured = measuring_rows(overview)
    # trainings have rows above
    assert sum(int(row[2].split("/")[1]) for row in measured) == len(steps_of(study)) - 2


@pytest.mark.parametrize(
    ("state", "reason", "situation"),
    [
        ("PENDING", "Priority", "queued"),
        ("PENDING", "JobHeldUser", "held"),
        ("PENDING", "JobHeldAdmin", "held"),
        ("REQUEUED", "BeginTime", "queued"),
        ("REQUEUE_HOLD", "None", "held"),
        ("SPECIAL_EXIT", "None", "held"),
        ("RUNNING", "None", "running"),
        ("COMPLETING", "None", "running"),
        ("SUSPENDED", "None", "running"),
        ("PENDING", "JobHoldMaxRequeue", "held"),
        ("PENDING", "launch failed requeued held", "held"),
        ("EXPEDITING", "None", "running"),  # since 25.05
    ],
)
def test_states_of_slurm(state, reason, situation):
    assert situation_of(in_state(state, reason)) == situation


def test_without_slurm_files_tell(half_way, study_dir, monkeypatch):
    def absent(_ids):
        raise UserError("squeue is not on PATH; run this on a login node")

    monkeypatch.setattr(cluster, "states", absent)
    record_start(study_dir, ("quantize-1", 0), "15_0", 1, position=1)
    record_end(study_dir, ("quantize-1", 0), "15_0", "failed")
    output = told_of(study_dir)
    assert "by marker files alone: squeue is not on PATH; run this on a login node" in output
    assert "failed quantize-1/0 (15_0): SLURM says nothing of it" in output
    rows = {row[0]: row for row in training_rows(look(study_dir))}
    assert rows["lr3e-2"][1] == "running, attempt 2"
    assert rows["lr3e-3"][1] == "made"
    assert {element.situation for element in look(study_dir).elements if not element.log} == {
        "unknown"
    }
    record_start(study_dir, ("train", 1), "13_1", 1, 0)
    fall_silent(study_dir)
    assert "failed train/1 (13_1): SLURM says nothing of it; train-lr3e-2" in told_of(study_dir)


def fall_silent(study_dir: Path) -> None:
    """Let all logs be of ten minutes ago."""
    for log in (study_dir / "slurm/logs").iterdir():
        os.utime(log, (time.time() - 600, time.time() - 600))


def test_of_what_slurm_says_nothing_status_says_what_to_do(
    half_way, study_dir, answers, monkeypatch
):
    monkeypatch.setattr(cluster, "gone", lambda _ids: set())
    unknown = half_way.element_ids["curvature", 1]
    del answers[unknown]
    output = told_of(study_dir)
    assert (
        f"SLURM says nothing of 1 element; see `squeue --jobs={unknown}`, or"
        " 'python -m slurm retry small' cancels and resubmits them\n"
    ) in output
    assert re.search(r"^lr3e-3 +curvature +0/2 +q\? +1 queued, 1 unknown$", output, re.MULTILINE)


def test_what_slurm_has_forgotten_failed_as_often_as_it_was_submitted(half_way, study_dir, answers):
    answers.clear()
    fall_silent(study_dir)
    overview = look(study_dir)
    assert {element.situation for element in overview.elements} == {"failed"}
    append(study_dir, "retried")
    assert {element.situation for element in look(study_dir).elements} == {"waiting"}


RUNNING, FAILED = in_state("RUNNING"), in_state("FAILED", code="1:0")
ENDED = in_state("COMPLETED", code="0:0")


@pytest.fixture
def trainings_failed(study_dir, study, answers):
    """A study whose trainings failed for good; its table was made of what there is."""
    save_study(study_dir, study)
    make(study_dir, study, TEXT)
    site, arrays = watched_site(study_dir.parent), arrays_of(study, JobLimits())
    write_scripts(study_dir, site, arrays)
    write_plan(study_dir, site, arrays, anew=True)
    record_call(study_dir, "train", 11, [0, 1])
    record_call(study_dir, FINAL, 12, [0])
    record_start(study_dir, (FINAL, 0), "12_0", nodes=1, position=0)
    record_end(study_dir, (FINAL, 0), "12_0", "partial")
    answers |= {"11_0": FAILED, "11_1": FAILED, "12_0": ENDED}
    return study_dir


def sleeps(monkeypatch: pytest.MonkeyPatch, between: Iterator[None]) -> None:
    """Run the next part of an iterator wherever `watch` would sleep; it sleeps no more often."""

    def sleep(_seconds: float) -> None:
        if next(between, "over") == "over":
            pytest.fail("it goes on")

    monkeypatch.setattr(time, "sleep", sleep)


def test_a_watch_ends_when_what_waits_will_never_start(trainings_failed, monkeypatch):
    sleeps(monkeypatch, iter(()))
    watch(trainings_failed, 10)
    situations = {element.situation for element in look(trainings_failed).elements}
    assert situations == {"failed", "waiting"}


def test_a_watch_goes_on_while_slurm_has_a_job_and_after_errors(
    trainings_failed, answers, monkeypatch, capsys
):
    answers["11_1"] = RUNNING
    known = cluster.states
    fault: list[Exception] = [OSError(errno.ESTALE, "Stale file handle")]

    def states(ids):
        if fault:
            raise fault[0]
        return known(ids)

    def happens() -> Iterator[None]:
        fault[0] = UserError("squeue: timed out; wait")
        yield
        fault.clear()
        yield
        answers["11_1"] = FAILED
        yield

    monkeypatch.setattr(cluster, "states", states)
    between = happens()
    sleeps(monkeypatch, between)
    watch(trainings_failed, 10)
    assert next(between, "over") == "over", "it did not end before"
    shown = capsys.readouterr().out
    assert "nothing was submitted: [Errno 116] Stale file handle" in shown
    assert "nothing was submitted: squeue: timed out; wait" in shown


def test_a_watch_submits_what_a_job_left_that_ended_while_it_looked(
    trainings_failed, study, answers, monkeypatch
):
    submitted_indices = []
    answers["11_0"] = RUNNING
    known = cluster.states

    def ends_after_this_answer(ids):
        states = known(ids)
        if states.get("11_0") == RUNNING:
            make(trainings_failed, study, ["train-lr3e-3"])
            answers["11_0"] = ENDED
        return states

    def sbatch(_script, array, _token):
        submitted_indices.append(array)
        return 20

    monkeypatch.setattr(cluster, "states", ends_after_this_answer)
    monkeypatch.setattr(cluster, "submit", sbatch)
    sleeps(monkeypatch, iter([None]))
    watch(trainings_failed, 10)
    assert submitted_indices


def test_node_hours_are_those_of_the_starts(study_dir, study, answers, monkeypatch):
    submission = submitted(study_dir, study)
    train = {name: submission.element_ids[name] for name in (("train", 0), ("train", 1))}
    lines = study_dir / "slurm/starts/train-0.jsonl"
    lines.parent.mkdir()
    # Killed: it recorded no end, and its log was written for 1,200 s.
    log = log_of(study_dir, "train", "1_7")
    log.parent.mkdir(exist_ok=True)
    log.touch()
    os.utime(log, (1300.0, 1300.0))
    for start in (
        {"job": "1_7", "restart": 0, "nodes": 3, "time": 100.0, "position": 0},
        {"job": train["train", 0], "restart": 0, "nodes": 2, "time": 2000.0, "position": 0},
        {"job": train["train", 0], "restart": 0, "ended": "failed", "until": 2000.0 + 3600},
        {"job": train["train", 0], "restart": 1, "nodes": 4, "time": 9000.0, "position": 0},
    ):
        with lines.open("a") as file:
            file.write(json.dumps(start) + "\n")
    answers[train["train", 0]] = in_state("RUNNING", nodes="node[1-4]")
    answers[train["train", 1]] = replace(in_state("PENDING", "Resources"), starts="2031-01-01T08")
    for run in study.runs:
        write_metrics(study_dir, run.name, range(1, 3), attempt=1, tokens_per_second=10.0)
    write_ending(RunDirectory(study_dir / study.runs[1].name), "diverged", 2)  # not recorded yet
    monkeypatch.setattr(time, "time", lambda: 9000.0 + 1800)
    hours = look(study_dir).hours
    assert hours.used == pytest.approx(3 * 1200 / 3600 + 2 * 1 + 4 * 0.5)
    left = study.runs[0].total_tokens - 2 * 2000
    assert hours.expected == pytest.approx(left / 10 / 3600)
    assert (hours.queued, hours.next_start) == (1, "2031-01-01T08")
    assert hours.waiting_hours == 3.0
    assert "node-hours: 5 used; " in told_of(study_dir)
    assert "1 element queued, the first for 3 h; next start expected 2031-01-01T08" in told_of(
        study_dir
    )


def test_what_restarts_have_cost_is_a_line(half_way, study_dir, study):
    """By the first attempt's 29 updates of 2 s and the second's 21, from step 10 on."""
    directory = RunDirectory(study_dir / "lr3e-2")
    attempts = [{"host": "node1", "began": began} for began in (0.0, 1000.0)]
    write_json(directory.environment_json, {"attempts": attempts})
    directory.metrics.unlink()
    for number, first, last, time_of_first in ((1, 1, 29, 100.0), (2, 10, 30, 1060.0)):
        for step in range(first, last + 1):
            moment = time_of_first + 2 * (step - first)
            write_metrics(study_dir, "lr3e-2", range(step, step + 1), number, time=moment)
    lost, used = 2 * 20 + 60, 156 + 100
    line = f"lost to restarts: {lost / 3600:.2g} node-hours of {used / 3600:.2g} (1 failure)"
    assert line in told_of(study_dir).splitlines()


def test_the_error_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert last_error(log) is None
    log.write_text(
        "error: first\n== 2026 start 1\nfine\nsrun: error: node1: task 0: Exited with exit code 2\n"
    )
    assert last_error(log) == "srun: error: node1: task 0: Exited with exit code 2"
    assert last_error(log, of_last_start=False) == "error: first"
    with log.open("a") as file:
        file.write("1: error: damping; raise it\nsrun: error: task 1: Exited\nno error: here\n")
    assert last_error(log) == "1: error: damping; raise it"
