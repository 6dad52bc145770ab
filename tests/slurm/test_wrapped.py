"""A study of stand-in steps in a real SLURM whose commands are wrapped, or missing on its nodes."""

import os
import re
import time
from pathlib import Path

import pytest

from base.errors import UserError
from slurm.submission.advance import advance
from slurm.submission.record import existing_submission, log_of, starts_of
from slurm.submission.submit import submit
from study.definition import Study
from study.pipeline.ledger import Ledger
from study.steps import steps_of
from tests.interpreter import interpreter
from tests.runs import write_program
from tests.slurm.lab import Lab, running
from tests.slurm.studies import changed, site_of, small_study
from tests.slurm.wrapped import WRAPPERS, without_commands, wrap
from tests.waiting import wait_until

# The interpreter of jobs: what measures is a stand-in.
PYTHON = """#!/bin/sh
[ "$2" = slurm ] && exec {interpreter} "$@"
exec {interpreter} -m tests.slurm.stand_in "$0" "$@"
"""


@pytest.fixture
def small_lab(lab_directory, slurm_installed, monkeypatch):
    """A node of one core: what could start at once has to wait in the queue."""
    with running(Lab(lab_directory, nodes=1, cpus=1)) as lab:
        monkeypatch.setenv("SLURM_CONF", str(lab.conf))
        yield lab


@pytest.fixture
def study() -> Study:
    """A run of two checkpoints, each with one group of specs."""
    return small_study("s", steps=24, runs=1, restart_every=None, curved=False)


def submitted(root: Path, study: Study, monkeypatch, **environment: str) -> Path:
    """Submit the study of stand-ins and return its directory."""
    root.mkdir()
    python = write_program(root / "python", PYTHON.format(interpreter=interpreter()))
    monkeypatch.setenv("STUDY_DIR", str(root / study.name))
    site = changed(site_of(root, train_nodes=1), python=python)
    submit(study, changed(site, environment=site.environment | environment))
    return root / study.name


def is_over(study_dir: Path) -> bool:
    return (study_dir / "steps/mirror.json").exists()


def check_each_started_once(study_dir: Path, study: Study) -> None:
    """Every step is complete, and every element was submitted and started once."""
    steps = steps_of(study)
    assert Ledger(study_dir, steps).complete_steps() == {step.name for step in steps}
    submission = existing_submission(study_dir)
    elements = [
        (array.name, index) for array in submission.arrays for index in range(len(array.elements))
    ]
    assert {key: len(submission.jobs_of[key]) for key in elements} == dict.fromkeys(elements, 1)
    starts = {key: len(starts_of(study_dir, key)) for key in elements}
    assert starts == dict.fromkeys(elements, 1)


def run_wrapped(root: Path, study: Study, monkeypatch, lines: dict[str, str]) -> None:
    monkeypatch.setenv("PATH", f"{wrap(root / 'bin', lines)}:{os.environ['PATH']}")
    study_dir = submitted(root / "runs", study, monkeypatch)
    wait_until(lambda: is_over(study_dir), "the end of the study")
    check_each_started_once(study_dir, study)


@pytest.mark.stress
@pytest.mark.parametrize("accounting", [False, True])
def test_a_study_ends_under_every_wrapper(
    lab_directory, slurm_installed, tmp_path, study, monkeypatch, accounting
):
    with running(Lab(lab_directory, nodes=1, cpus=1, accounting=accounting)) as lab:
        monkeypatch.setenv("SLURM_CONF", str(lab.conf))
        for number, (name, lines) in enumerate(WRAPPERS.items()):
            began_at = time.monotonic()
            with monkeypatch.context() as environment:
                run_wrapped(tmp_path / str(number), study, environment, lines)
            print(f"{name}: {time.monotonic() - began_at:.0f} s")


def test_jobs_on_nodes_without_commands_end_with_their_work(
    small_lab, tmp_path, study, monkeypatch
):
    """Somebody else submits, as `status --watch` does, by commands that are wrapped."""
    path = str(without_commands(tmp_path / "programs"))
    silent = tmp_path / "silent"  # while it is there, squeue says nothing
    lines = WRAPPERS["notes"] | {"squeue": f"[ -e '{silent}' ] || slurm \"$@\" "}
    with monkeypatch.context() as environment:
        environment.setenv("PATH", f"{wrap(tmp_path / 'bin', lines)}:{os.environ['PATH']}")
        study_dir = submitted(tmp_path / "runs", study, environment, PATH=path)
        silent.touch()
        unknown = []

        def ended() -> bool:
            try:
                advance(study_dir)
            except UserError as error:
                unknown.append(str(error))
                silent.unlink(missing_ok=True)
            if not silent.exists():
                time.sleep(0.5)
            return is_over(study_dir)

        wait_until(ended, "the end of the study")
    assert unknown
    said = re.compile(r"SLURM says nothing of \d elements?; see ")
    assert [error for error in unknown if not said.match(error)] == []
    check_each_started_once(study_dir, study)
    submission = existing_submission(study_dir)
    wait_until(lambda: not small_lab.command("squeue", "--noheader"), "no job left")
    for element, job in submission.element_ids.items():
        assert "this node has no sbatch" in log_of(study_dir, element[0], job).read_text()
        shown = small_lab.command("scontrol", "show", "job", job)
        (end,) = [word for word in shown.split() if word.startswith("EndTime=")]
        ended_at = time.mktime(time.strptime(end, "EndTime=%Y-%m-%dT%H:%M:%S"))
        work_ended_at = starts_of(study_dir, element)[-1]["until"]
        print(f"{element}: {ended_at - work_ended_at:.1f} s after its work")
        # A busy machine takes seconds to end a process; each took 90 s while it asked again.
        assert ended_at - work_ended_at < 10
