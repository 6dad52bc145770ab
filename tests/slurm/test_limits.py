"""Studies under the limits of sites, each to its end unattended. Their work is a stand-in's."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from base.errors import UserError
from slurm import cluster
from slurm.cluster import SubmitLimitError
from slurm.site import KINDS, Site
from slurm.status.table import watch
from slurm.submission.record import existing_submission, log_of, starts_of
from slurm.submission.submit import submit
from study.definition import Study
from study.pipeline.ledger import Ledger
from study.steps import steps_of
from tests.interpreter import interpreter
from tests.runs import write_program
from tests.slurm.lab import Lab, running
from tests.slurm.studies import changed, site_of, small_study, text_of
from tests.waiting import wait_until

# The check of nodes is real but for their GPUs, as is SLURM; `tests.slurm.stand_in` runs
# `python -m slurm`.
PYTHON = """#!/bin/sh
case "$2" in slurm.job.health) exec {0} -m "$2" "$3" ;; esac
exec {0} -m tests.slurm.stand_in "$0" "$@"
"""
LIMIT = "nothing was submitted: sbatch: QOSMaxSubmitJobPerUserLimit"


@pytest.fixture
def study(inputs) -> Study:
    """A run of two checkpoints, with text that is there: six elements."""
    text = text_of(inputs)
    return small_study("s", steps=24, runs=1, restart_every=None, curved=False, text=text)


def stand_in_site(directory: Path, study: Study, train_nodes: int = 1, **fields: Any) -> Site:
    """A site whose jobs do their work by the stand-in; fields are changes of tables."""
    python = write_program(directory / "bin/python", PYTHON.format(interpreter()))
    root = directory / "runs"
    root.mkdir(exist_ok=True)
    site = site_of(root, train_nodes=train_nodes)
    return changed(site, python=python, environment={"STUDY_DIR": str(root / study.name)}, **fields)


def in_queue(lab: Lab) -> str:
    """The jobs of the lab, asked for no more often than five times a second."""
    time.sleep(0.2)
    return lab.command("squeue", "--noheader", "--format=%j %i %T %r")


def check_ended(study: Study, study_dir: Path) -> None:
    """Every step is complete, and every element was started once."""
    steps = steps_of(study)
    assert Ledger(study_dir, steps).complete_steps() == {step.name for step in steps}
    starts = {
        (array.name, index): len(starts_of(study_dir, (array.name, index)))
        for array in existing_submission(study_dir).arrays
        for index in range(len(array.elements))
    }
    assert set(starts.values()) == {1}, starts


def test_a_queue_full_of_others_is_waited_for_in_the_queue(
    accounting_lab, tmp_path, monkeypatch, study, capsys
):
    """Another job takes one of two places until a job of the study has been requeued."""
    lab, site = accounting_lab, stand_in_site(tmp_path, study)
    study_dir = site.root / study.name
    lab.limit_submissions(2)
    try:
        other = lab.command("sbatch", "--parsable", "--hold", "--wrap=exit 0").strip()
        assert submit(study, site) == {"train": 1}
        assert "without room for two keep 'status --watch' running" in capsys.readouterr().err
        train = existing_submission(study_dir).element_ids["train", 0]
        wait_until(lambda: f"{train} PENDING BeginTime" in in_queue(lab), "requeued")
        assert LIMIT in log_of(study_dir, "train", train).read_text()
        lab.command("scancel", other)
        wait_until(lambda: not in_queue(lab), "the end")
    finally:
        lab.limit_submissions(-1)
    check_ended(study, study_dir)


@pytest.mark.parametrize(
    "stderr",
    [
        "sbatch: error: AssocGrpSubmitJobsLimit\nsbatch: error: Batch job submission failed: Job"
        " violates accounting/QOS policy (job submit limit, user's size and/or time limits)\n",
        "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit"
        " limit, user's size and/or time limits)\n",
        "sbatch: error: Batch job submission failed: Resource temporarily unavailable\n",
        "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying\n",
        "sbatch: error: Slurm job queue full, sleeping and retrying\n",
    ],
)
def test_words_of_a_full_queue(tmp_path, monkeypatch, stderr):
    """And not those of a limit that more room would not change."""
    write_program(tmp_path / "sbatch", '#!/bin/sh\nprintf %s "$STDERR" >&2\nexit 1\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("STDERR", stderr)
    with pytest.raises(SubmitLimitError):
        cluster.submit(tmp_path / "any.sh", "0", "token")
    monkeypatch.setenv("STDERR", stderr.replace("AssocGrpSubmitJobs", "QOSMaxNodePerJob"))
    if "Assoc" in stderr:
        with pytest.raises(UserError, match="correct the site file") as error:
            cluster.submit(tmp_path / "any.sh", "0", "token")
        assert not isinstance(error.value, SubmitLimitError)


@pytest.mark.stress
def test_a_queue_for_one_job_ends_with_a_watch(accounting_lab, tmp_path, study):
    """The job of the study fills it itself."""
    lab, site = accounting_lab, stand_in_site(tmp_path, study)
    lab.limit_submissions(1)
    try:
        submit(study, site)
        watch(site.root / study.name, 1)
    finally:
        lab.limit_submissions(-1)
    check_ended(study, site.root / study.name)


GPU = {"gpus_per_node": 1, "gpus": "gres", "ranks_per_node": None}
ONE_GPU = {kind: GPU for kind in KINDS if kind != "light"}
ONE_OF_EACH = {"throttle": dict.fromkeys(KINDS, 1)}
# Name -> nodes of the lab, nodes of a training, settings of sacctmgr, MaxArraySize, limits of the
# site file, its resources.
MATRIX: dict[str, tuple] = {
    "arrays of 2": (2, 1, None, 2, {}, {}),
    "arrays of 3": (2, 1, None, 3, {}, {}),
    "arrays of 5": (2, 1, None, 5, {}, {}),
    "2 submitted": (2, 1, "qos normal set MaxSubmitJobsPerUser=2", 3, {}, {}),
    "3 submitted": (2, 1, "qos normal set MaxSubmitJobsPerUser=3", 3, {}, {}),
    "2 of the QOS": (2, 1, "qos normal set GrpSubmitJobs=2", 3, {}, {}),
    "2 of the user": (2, 1, "user root set MaxSubmitJobs=2", 6001, {}, {}),
    "2 of the account": (2, 1, "account research set GrpSubmitJobs=2", 6001, {}, {}),
    "1 at work": (2, 1, "qos normal set MaxJobsPerUser=1", 6001, {}, {}),
    "1 of the QOS at work": (2, 1, "qos normal set GrpJobs=1", 6001, {}, {}),
    "one node": (1, 1, None, 6001, {}, {}),
    "a GPU a node": (2, 2, None, 3, {}, ONE_GPU),
    "1 queued": (2, 1, None, 3, {"max_queued": 1}, {}),
    "1 of each kind": (2, 1, None, 6001, ONE_OF_EACH, {}),
}


def drawn(seed: int) -> tuple:
    """Limits drawn at random."""
    draw = random.Random(seed)
    nodes = draw.choice((1, 2, 3))
    limits = [f"qos normal set {name}" for name in ("MaxSubmitJobsPerUser", "GrpSubmitJobs")]
    limit = draw.choice([*limits, "user root set MaxSubmitJobs", None])
    settings: dict[str, Any] = {"max_queued": draw.choice((1, 2, 3, 100))}
    settings["throttle"] = {kind: draw.choice((1, 2, 50)) for kind in KINDS}
    settings["specs_per_job"] = draw.choice((1, 4))
    settings["checkpoints_per_job"] = draw.choice((1, 2))
    return (
        nodes,
        draw.choice((1, min(2, nodes))),
        limit and f"{limit}={draw.choice((2, 3, 4))}",
        draw.choice((2, 3, 5, 6001)),
        settings,
        draw.choice(({}, ONE_GPU)),
    )


SEEDS = range(20)


@pytest.mark.stress
@pytest.mark.parametrize(
    "case", [*MATRIX.values(), *map(drawn, SEEDS)], ids=[*MATRIX, *map(str, SEEDS)]
)
def test_small_limits_end_unattended(tmp_path, lab_directory, slurm_installed, monkeypatch, case):
    nodes, train_nodes, limit, array_size, limits, resources = case
    study = small_study("s", steps=24, runs=2, restart_every=None, curved=True)
    epilog = write_program(tmp_path / "epilog", "#!/bin/sh\nsleep 1\n")  # ended, and still there
    site = stand_in_site(tmp_path, study, train_nodes, limits=limits, resources=resources)
    conf = {"MaxArraySize": str(array_size), "Epilog": str(epilog)}
    lab = Lab(lab_directory, nodes, 4, gpus=1, extra_conf=conf, accounting=limit is not None)
    with running(lab):
        monkeypatch.setenv("SLURM_CONF", str(lab.conf))
        if limit:
            lab.command("sacctmgr", "--immediate", "modify", *limit.split())
        submit(study, site)
        wait_until(lambda: not in_queue(lab), "the end")
        check_ended(study, site.root / study.name)
