"""Trainings over two nodes of a real SLURM that hang or are preempted: resumed, unattended."""

import json
import re
import time
from pathlib import Path

import pytest

from slurm import cluster
from slurm.submission.advance import advance, why_not
from slurm.submission.record import existing_submission, log_of, starts_of
from slurm.submission.submit import submit
from slurm.submission.survey import survey
from study.definition import Study
from tests.interpreter import interpreter
from tests.runs import write_program
from tests.slurm.faults import Storm
from tests.slurm.lab import Lab, running
from tests.slurm.studies import changed, site_of, small_study, text_of
from tests.waiting import wait_until

# The interpreter of jobs, but that the first torchrun of node2 never comes to the rendezvous.
LATE = """#!/bin/bash
case "$*" in *slurm.job.rendezvous*)
    [ "$SLURMD_NODENAME" = node2 ] && mkdir {late} 2>/dev/null && exec sleep 100000;;
esac
exec {python} "$@"
"""


@pytest.fixture
def study(inputs) -> Study:
    """One run of 30 steps and no curvature, of a text that is there."""
    return small_study(
        "hang", steps=30, runs=1, restart_every=3, curved=False, text=text_of(inputs)
    )


@pytest.fixture
def lab(lab_directory, slurm_installed, monkeypatch):
    with running(Lab(lab_directory, nodes=2, cpus=1)) as lab:
        monkeypatch.setenv("SLURM_CONF", str(lab.conf))
        yield lab


def log_and_attempts(study_dir: Path, run: str) -> tuple[str, int]:
    element = existing_submission(study_dir).element_ids["train", 0]
    environment = json.loads((study_dir / run / "environment.json").read_text())
    return log_of(study_dir, "train", element).read_text(), len(environment["attempts"])


def test_a_stopped_rank_is_named_and_training_resumed_in_the_same_allocation(lab, tmp_path, study):
    (run,), study_dir = (run.name for run in study.runs), tmp_path / study.name
    submit(study, changed(site_of(tmp_path), limits={"hang_seconds": 20}))
    storm = Storm(lab, study_dir, [run], tmp_path)
    wait_until(lambda: storm.steps(run) >= 5, "five steps")  # it may be saving by now
    beat = json.loads((study_dir / run / "watch/rank1.json").read_text())
    host, pid = beat[1], beat[2]
    lab.inside(int(host.removeprefix("node")), "kill", "-STOP", str(pid))
    wait_until(lambda: (study_dir / "steps" / f"train-{run}.json").exists(), "the run's end")
    log, attempts = log_and_attempts(study_dir, run)
    assert f"no sign of life of rank 1 on {host} (pid {pid})" in log
    assert "it is resumed on the same nodes" in log
    assert attempts == 2
    assert len(starts_of(study_dir, ("train", 0))) == 1


def test_a_rendezvous_that_one_node_never_comes_to_is_ended(lab, tmp_path, study):
    (run,), study_dir = (run.name for run in study.runs), tmp_path / study.name
    late = LATE.format(late=tmp_path / "late", python=interpreter())
    python = write_program(tmp_path / "python", late)
    submit(study, changed(site_of(tmp_path), python=python, limits={"silent_seconds": 45}))
    wait_until(lambda: (study_dir / "steps" / f"train-{run}.json").exists(), "the run's end")
    log, attempts = log_and_attempts(study_dir, run)
    assert "error: hung: training does not start: its ranks have not met" in log
    assert attempts == 1, "the one that never met is none"
    heads = re.findall(r"--master-addr (\S+) --master-port (\d+)", log)
    assert len({port for _, port in heads}) == len(heads) > 1, "another port at every attempt"
    assert {address for address, _ in heads} == {"node1"}


@pytest.mark.parametrize("grace_seconds", [15, pytest.param(0, marks=pytest.mark.stress)])
def test_a_training_that_is_preempted_and_not_requeued_comes_back(
    lab, tmp_path, study, grace_seconds
):
    """PreemptMode=CANCEL. With time to leave, the job saves and submits itself again; without, any
    other look does, such as that of `status --watch`.
    """
    (run,), study_dir = (run.name for run in study.runs), tmp_path / study.name
    lab.command("scontrol", "update", "PartitionName=spot", f"GraceTime={grace_seconds}")
    submit(study, changed(site_of(tmp_path), slurm={"partition": "spot"}))
    storm = Storm(lab, study_dir, [run], tmp_path)
    wait_until(lambda: storm.steps(run) >= 5, "five steps")
    element = existing_submission(study_dir).element_ids["train", 0]
    urgent = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    lab.command("sbatch", *urgent, "--wrap=sleep 5")
    wait_until(lambda: cluster.states([element])[element].has_ended, "preempted")

    def over() -> bool:
        if not grace_seconds:
            advance(study_dir, patience_seconds=60)  # the job that was preempted may be submitting
            time.sleep(1)
        return (study_dir / "steps" / f"train-{run}.json").exists()

    wait_until(over, "the run's end")
    first, second = starts_of(study_dir, ("train", 0))
    assert first.get("ended") == ("asked" if grace_seconds else "lost")
    assert second["position"] > first["position"], "from a checkpoint"
    assert why_not(survey(study_dir, existing_submission(study_dir), study), ("train", 0)) is None
