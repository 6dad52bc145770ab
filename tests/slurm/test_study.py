"""A study as jobs of a real SLURM: unattended, and the same table as the local runner's."""

import json
import subprocess

import pytest

from slurm.submission.advance import cancel
from slurm.submission.record import log_of, starts_of
from slurm.submission.submit import submit
from study.pipeline.ledger import Ledger
from study.steps import steps_of
from tests.slurm.faults import Storm
from tests.slurm.lab import Lab, running
from tests.slurm.studies import run_here, site_of, small_study, table, text_of
from tests.waiting import HANG_SECONDS


def attempts(study_dir, run: str) -> list[dict]:
    return json.loads((study_dir / run / "environment.json").read_text())["attempts"]


def check_complete(study, study_dir, local) -> None:
    steps = steps_of(study)
    assert Ledger(study_dir, steps).complete_steps() == {step.name for step in steps}
    assert table(study_dir) == table(local), "bit for bit"
    for run in study.runs:
        lines = (study_dir / run.name / "metrics.jsonl").read_text().splitlines()
        rows = map(json.loads, lines)
        assert max(row["step"] for row in rows) == run.total_steps


def test_a_study_as_jobs_gives_the_table_of_the_local_runner(
    tmp_path, inputs, lab_directory, slurm_installed, monkeypatch
):
    """The text is there: the stress test makes one as jobs, too."""
    text = text_of(inputs)
    study = small_study("jobs", steps=150, runs=1, restart_every=10, curved=False, text=text)
    local, study_dir = run_here(tmp_path / "local", study), tmp_path / "runs" / study.name
    with running(Lab(lab_directory, cpus=1)) as lab:
        monkeypatch.setenv("SLURM_CONF", str(lab.conf))
        submit(study, site_of(tmp_path / "runs"))
        storm = Storm(lab, study_dir, [run.name for run in study.runs], tmp_path)
        faults = ["rank_killed", "supervisor_killed", "site_edited"]
        storm.go_on(faults)
        assert [name for name, _ in storm.struck] == faults
        assert submit(study, site_of(tmp_path / "runs")) == {}
    check_complete(study, study_dir, local)
    (run,) = study.runs
    # The rank's end is another attempt in the same allocation, the supervisor's another job.
    assert len(attempts(study_dir, run.name)) == 3
    starts = starts_of(study_dir, ("train", 0))
    logs = [log_of(study_dir, "train", start["job"]).read_text() for start in starts]
    assert len(starts) == 2, "\n".join(logs)
    assert (study_dir / "report.html").is_file()


@pytest.fixture
def small_disk(tmp_path):
    """A filesystem that can be filled."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.stress
@pytest.mark.parametrize("order", [1, -1])
def test_a_storm_of_faults_unattended(
    tmp_path, lab_directory, small_disk, slurm_installed, monkeypatch, order
):
    """Limits of a minute, 6 jobs in the queue at most, a namesake study in another root."""
    study = small_study("storm", steps=2000, runs=2, restart_every=50, curved=True)
    faults = [
        *("rank_killed", "agent_killed", "supervisor_killed", "node_lost", "preempted"),
        *("controller_restarted", "accounts_down", "disk_full", "site_edited"),
    ][::order]
    with running(Lab(lab_directory, cpus=1, accounting=True)) as lab:
        monkeypatch.setenv("SLURM_CONF", str(lab.conf))
        lab.limit_submissions(6)
        other = tmp_path / "other"
        other.mkdir()
        submit(study, site_of(other))
        submit(study, site_of(small_disk, train_minutes=1, starts=6))
        cancel(other / study.name)
        study_dir = small_disk / study.name
        # Faults strike one upon the other, so some starts end before a checkpoint: hence six
        # without progress.
        storm = Storm(lab, study_dir, [run.name for run in study.runs], small_disk)
        storm.go_on(faults, seconds=9 * HANG_SECONDS)
        assert [name for name, _ in storm.struck] == faults
    local = run_here(tmp_path / "local", study)
    check_complete(study, study_dir, local)
    restarts = [len(starts_of(study_dir, ("train", index))) for index in range(2)]
    print(f"struck {storm.struck}, starts of the trainings {restarts}")
    assert min(restarts) >= 3, "one-minute limits alone end each of them more than once"
