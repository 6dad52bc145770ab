"""Submitting to a real SLURM: what is submitted, and when; and what is refused."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from base.errors import UserError
from base.files import write_json
from slurm import cluster
from slurm.site import Site
from slurm.submission import record
from slurm.submission.advance import advance, cancel
from slurm.submission.arrays import FINAL
from slurm.submission.record import (
    JOBS_JSONL,
    SLURM,
    append,
    exclude,
    existing_submission,
    lives,
    log_of,
    read_submission,
    record_end,
    record_start,
    script_path,
    submitting,
    unexclude,
)
from slurm.submission.submit import check_time_to_save, dry_run, submit, training_layouts
from slurm.submission.survey import survey
from study.definition import Study, save_study
from study.recipes.resolve import resolve
from study.steps import steps_of
from tests.interpreter import interpreter
from tests.runs import PROJECT
from tests.slurm.lab import Lab, running
from tests.slurm.studies import changed, make, site_of, small_study
from tests.slurm.wrapped import wrap
from tests.waiting import HANG_SECONDS
from train.planning.memory import parameter_count, rank_memory
from train.run.config import RunConfig

TEXT = ("corpus", "prepare-train", "prepare-held_out", "prepare-calibration")


@pytest.fixture
def full(lab):
    """A lab on which nothing of these tests starts."""
    lab.command("scontrol", "update", "PartitionName=train", "State=DOWN")
    yield lab
    lab.command("scancel", "--user=root")
    lab.command("scontrol", "update", "PartitionName=train", "State=UP")


@pytest.fixture
def study() -> Study:
    """Two runs, two checkpoints each, one group of specs, curvature."""
    return small_study("s", steps=24, runs=2, restart_every=None, curved=True)


@pytest.fixture
def site(tmp_path) -> Site:
    (tmp_path / "runs").mkdir()
    return site_of(tmp_path / "runs")


@pytest.fixture
def directory(full, site, study) -> Path:
    """The directory of the study, which is not submitted yet."""
    return site.root / study.name


def complete(directory, study: Study, *begins: str) -> None:
    """Make the steps whose names begin so."""
    make(directory, study, [step.name for step in steps_of(study) if step.name.startswith(begins)])


def in_queue(name: str) -> set[str]:
    """The elements that SLURM has of jobs of a name."""
    command = ["squeue", "--noheader", "--array", f"--name={name}", "-o", "%F_%K"]
    return set(subprocess.check_output(command, text=True).split())


def test_what_can_start_is_submitted_once_and_waits_for_nothing(full, site, directory, study):
    assert submit(study, site) == {"text": 1}
    (job,) = existing_submission(directory).jobs
    shown = full.command("scontrol", "show", "job", str(job.id))
    assert "Dependency=(null)" in shown, "nothing waits in the queue for anything else"
    assert f"Comment={job.token}" in shown
    assert submit(study, site) == {}
    assert advance(directory) == {}
    complete(directory, study, *TEXT)
    assert advance(directory) == {"train": 2}
    # A checkpoint is exported while its run still trains.
    checkpoint = steps_of(study)[[s.kind for s in steps_of(study)].index("export")].reads[0]
    (directory / checkpoint).parent.mkdir(parents=True)
    write_json(directory / checkpoint, {"of": "the first"})
    assert advance(directory) == {"export": 1}
    assert advance(directory) == {}
    complete(directory, study, "train", "export")
    assert advance(directory) == {"quantize-1": 4, "curvature": 4}
    assert len(in_queue("s.quantize-1")) == 4
    complete(directory, study, "quantize", "curvature")
    lab_jobs = {job.id for job in existing_submission(directory).jobs}
    cluster.cancel([str(job) for job in lab_jobs])
    assert advance(directory) == {FINAL: 1}
    assert advance(directory) == {}


def test_a_call_whose_answer_was_lost_is_found_by_its_token(site, directory, study):
    submit(study, site)
    jobs = directory / SLURM / JOBS_JSONL
    kept = jobs.read_text().splitlines(keepends=True)[:-1]
    jobs.write_text("".join(kept))
    before = in_queue("s.text")
    assert submit(study, site) == {}
    assert in_queue("s.text") == before
    assert len(existing_submission(directory).jobs) == 1


LOST_CALL = {"token": "quantdyn:none", "script": "0" * 16, "time": 0.0, "user": "root"}


def test_of_what_slurm_says_nothing_only_a_retry_submits_again(
    site, directory, study, tmp_path, monkeypatch
):
    submit(study, site)
    (job,) = before = in_queue("s.text")
    with monkeypatch.context() as environment:
        commands = wrap(tmp_path / "bin", {"squeue": "exit 0"})
        environment.setenv("PATH", f"{commands}:{os.environ['PATH']}")
        message = f"SLURM says nothing of 1 element; see `squeue --jobs={job}`, or 'python -m slurm"
        for again in (advance, lambda _: submit(study, site)):
            with pytest.raises(UserError, match=message):
                again(directory)
        assert submit(study, site, again=True) == {"text": 1}
    after = in_queue("s.text")
    assert len(after) == 1
    assert not after & before, "the earlier one is cancelled, by its id"


def test_a_job_that_squeue_does_not_list_is_judged_by_its_own_files(tmp_path):
    """Beside an age of the log, by the clock of its filesystem, counts how its start ended."""
    element, job, log = ("train", 0), "7_0", log_of(tmp_path, "train", "7_0")
    log.parent.mkdir(parents=True)
    assert lives(tmp_path, element, job) is None, "it never started"
    log.touch()
    assert lives(tmp_path, element, job), "it is about to"
    record_start(tmp_path, element, job, 1, 0)
    assert lives(tmp_path, element, job)
    for age, alive in ((250, True), (350, False)):
        os.utime(log, (time.time() - age, time.time() - age))
        assert lives(tmp_path, element, job) is alive
    record_end(tmp_path, element, job, "asked")
    assert lives(tmp_path, element, job) is None, "SLURM may have requeued it"
    log.touch()
    record_end(tmp_path, element, job, "failed")
    assert lives(tmp_path, element, job) is False


def test_a_call_that_never_came_about_is_made_again(site, directory, study):
    submit(study, site)
    complete(directory, study, *TEXT)
    append(directory, "calling", array="train", indices=[0, 1], **LOST_CALL)
    assert advance(directory) == {"train": 2}


def test_another_root_with_a_study_of_the_same_name_is_left_alone(full, tmp_path, study):
    here, there = tmp_path / "here", tmp_path / "there"
    for root in (here, there):
        root.mkdir()
        submit(study, site_of(root))
    both = in_queue("s.text")
    assert len(both) == 2
    append(here / "s", "calling", array="text", indices=[0], **LOST_CALL)
    submit(study, site_of(here))
    cancel(here / "s")
    (left,) = in_queue("s.text")
    assert left == existing_submission(there / "s").element_ids["text", 0]


def test_an_edited_site_file_acts_on_what_waits(full, site, directory, study):
    submit(study, site)
    complete(directory, study, *TEXT)
    advance(directory)
    before = in_queue("s.train")
    assert submit(study, site) == {}, "the same site"
    assert submit(study, changed(site, resources={"train": {"time": "30"}})) == {"train": 2}
    after = in_queue("s.train")
    assert len(after) == 2
    assert not after & before
    assert "TimeLimit=00:30:00" in full.command("scontrol", "show", "job", min(after))
    assert advance(directory) == {}


def test_what_the_user_cancelled_comes_back_by_retry_alone(site, directory, study):
    submit(study, site)
    complete(directory, study, *TEXT)
    advance(directory)
    cluster.cancel([existing_submission(directory).element_ids["train", 1]])
    # By scancel: it shows until SLURM forgets it, and is remembered here.
    assert advance(directory) == {}
    assert ("train", 1) in existing_submission(directory).cancelled
    assert cancel(directory, "train")[0] == [("train", 0)]
    assert submit(study, site) == {FINAL: 1}, "a table of what there is"
    assert in_queue("s.train") == set()
    assert submit(study, site, again=True) == {"train": 2}


def test_a_cancelled_study_stays_cancelled(site, directory, study):
    submit(study, site)
    cancel(directory)
    complete(directory, study, *TEXT)
    assert advance(directory) == {}
    assert submit(study, site, again=True) == {"train": 2}


def test_excluded_nodes_are_those_of_the_site_and_of_the_study(full, site, directory, study):
    site = changed(site, slurm={"exclude": "node4"})
    submit(study, site)
    complete(directory, study, *TEXT)
    exclude(directory, {"node2": "no GPU"})
    advance(directory)
    job = existing_submission(directory).element_ids["train", 0]
    assert "ExcNodeList=node[2,4]" in full.command("scontrol", "show", "job", job)
    unexclude(directory, ["node2"])
    submit(study, site)
    job = existing_submission(directory).element_ids["train", 0]
    assert "ExcNodeList=node4\n" in full.command("scontrol", "show", "job", job)
    with pytest.raises(UserError, match="node 'node2' is not excluded; take one of none"):
        unexclude(directory, ["node2"])


def test_no_more_is_queued_than_the_site_says(site, directory, study):
    submit(study, changed(site, limits={"max_queued": 5, "throttle": {"curvature": 1}}))
    complete(directory, study, *TEXT, "train", "export")
    cluster.cancel([existing_submission(directory).element_ids["text", 0]])
    assert advance(directory) == {"quantize-1": 4, "curvature": 1}
    complete(directory, study, "quantize")
    first = existing_submission(directory).element_ids["quantize-1", 0]
    cluster.cancel([first.partition("_")[0]])
    assert advance(directory) == {}, "one of curvature is there"


def test_a_full_queue_is_filled_as_far_as_it_goes(site, directory, study, monkeypatch):
    """A stand-in for the limit of a QOS: 3 jobs more."""
    real, left = cluster.submit, [3]

    def limited(script, array, token):
        first, _, last = array.partition("-")
        count = int(last or first) + 1 - int(first)
        if count > left[0]:
            raise cluster.SubmitLimitError("sbatch: QOSMaxSubmitJobPerUserLimit")
        left[0] -= count
        return real(script, array, token)

    submit(study, site)
    complete(directory, study, *TEXT, "train", "export")
    monkeypatch.setattr(cluster, "submit", limited)
    assert advance(directory) == {"quantize-1": 3}
    assert advance(directory) == {}
    left[0] = 10
    assert advance(directory) == {"quantize-1": 1, "curvature": 4}


def test_a_full_queue_of_others_is_said(full, site, study, monkeypatch):
    def refused(script, array, token):
        raise cluster.SubmitLimitError("sbatch: full; lower limits.max_queued")

    monkeypatch.setattr(cluster, "submit", refused)
    with pytest.raises(UserError, match=r"lower limits\.max_queued"):
        submit(study, site)


def test_two_submissions_at_once(site, directory, study, monkeypatch):
    monkeypatch.setattr(record, "PATIENCE_SECONDS", 0.5)
    with submitting(directory), pytest.raises(UserError, match="another command is submitting"):
        submit(study, site)
    assert read_submission(directory) is None


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"resources": {"train": {"partition": "nowhere"}}}, "Invalid partition name .*; correct"),
        ({"resources": {"train": {"nodes": 99}}}, "Requested node configuration|nodes"),
        ({"disk": {"reserve_gb": 1e9}}, "free space, take a root on another"),
        ({"python": Path("/nowhere")}, "is not a program; correct python in"),
        ({"project": Path("/nowhere")}, "is not a checkout of this project; correct"),
    ],
)
def test_nothing_is_submitted_where_something_is_wrong(site, directory, study, wrong, reason):
    with pytest.raises(UserError, match=reason):
        submit(study, changed(site, **wrong))
    recorded = read_submission(directory)
    assert recorded is None or not recorded.jobs


def test_another_cut_has_to_wait_for_what_is_in_the_queue(site, directory, study):
    other = changed(site, limits={"specs_per_job": 1})
    submit(study, site)
    with pytest.raises(UserError, match=r"cut in another way; .* 'python -m slurm cancel s'"):
        submit(study, other)
    cancel(directory)
    assert submit(study, other) == {"text": 1}, "a record begins anew with another cut"


def test_a_study_of_400_checkpoints_and_12_specs_keeps_to_the_limits(
    tmp_path, lab_directory, slurm_installed, monkeypatch
):
    specs = [f"{method}-b{bits}-g32" for method in ("gptq", "rtn") for bits in (2, 3, 4, 5, 6, 8)]
    few = small_study("many", steps=400, runs=1, restart_every=None, curved=True)
    content = few.model_dump(mode="json")
    content["runs"][0]["save_steps"] = list(range(1, 401))
    content["quantization"]["specs"] = specs
    study = Study.model_validate_json(json.dumps(content))
    with running(Lab(lab_directory, nodes=1, extra_conf={"MaxArraySize": "150"})) as lab:
        monkeypatch.setenv("SLURM_CONF", str(lab.conf))
        lab.command("scontrol", "update", "PartitionName=train", "State=DOWN")
        site = changed(site_of(tmp_path, train_nodes=1), limits={"max_queued": 2000})
        directory = tmp_path / study.name
        assert submit(study, site) == {"text": 1}
        complete(directory, study, *TEXT, "train", "export")
        counts = advance(directory)
        assert max(counts.values()) == 150
        assert sum(counts.values()) == 400 * (3 + 1)
        assert advance(directory) == {}
        submission = existing_submission(directory)
        assert len(survey(directory, submission, study).active) == sum(counts.values())


def test_the_scripts_are_in_the_study_as_submitted(site, directory, study):
    submit(study, site)
    printed = {
        text.partition("\n")[0].split()[-1]: text.partition("\n")[2]
        for text in dry_run(study, site)
    }
    for array in existing_submission(directory).arrays:
        path = script_path(directory, array.name)
        assert path.read_text() == printed[str(path)]
        assert path.stat().st_mode & 0o777 == 0o600
    for name in ("submission.json", "scripts/site.json"):
        assert (directory / SLURM / name).stat().st_mode & 0o777 == 0o600
    assert json.loads((directory / "slurm/scripts/environment.json").read_text())["python"]
    assert not (directory / "slurm/starts").exists()


def test_two_processes_that_submit_at_once_submit_once(site, directory, study, tmp_path):
    save_study(tmp_path, study)
    code = (
        "import sys; from pathlib import Path\n"
        "from base.errors import UserError\n"
        "from slurm.site import Site\n"
        "from slurm.submission.submit import submit\n"
        "from study.definition import load_study\n"
        "try:\n"
        "    print(len(submit(load_study(Path(sys.argv[1])), Site.model_validate_json(sys.argv[2]))))\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    both = [
        subprocess.Popen(
            [interpreter(), "-c", code, str(tmp_path), site.model_dump_json()],
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = sorted(process.communicate(timeout=HANG_SECONDS)[0].strip() for process in both)
    assert [(job.array, job.indices) for job in existing_submission(directory).jobs] == [
        ("text", (0,))
    ]
    assert outputs[0] == "0" or "another command" in outputs[1]
    assert "1" in outputs


def test_layouts_follow_from_the_gpus_that_a_site_states(tmp_path):
    big = resolve("olmo2-7b-lr", "full")

    def layouts_on(nodes: int, gpus: int, memory_gb: float | None) -> dict[str, RunConfig] | None:
        gpus_of_a_node = {"gpus_per_node": gpus, "gpu_memory_gb": memory_gb}
        train = {"nodes": nodes, "ranks_per_node": None} | gpus_of_a_node
        return training_layouts(big, changed(site_of(tmp_path), resources={"train": train}))

    layouts = layouts_on(2, 8, 141)
    assert layouts == {run.name: run for run in big.trained}, "the recipe's own layout fits"
    smaller = layouts_on(2, 8, 64)
    assert smaller is not None
    for run in smaller.values():
        assert rank_memory(run, 16).bytes <= 64e9
    assert layouts_on(1, 1, None) is None, "nothing is known of them"
    with pytest.raises(UserError, match=r"1 nodes of 1 x GPU of 80 GB; .* 4 x h100, "):
        layouts_on(1, 1, 80)


def test_a_training_that_could_not_save_before_its_time_limit_is_refused(tmp_path):
    """The 7B on a node may have 72 bytes a parameter to write, 526 GB: twice 34 of a full state.

    They are 2 of the weights, 12 of AdamW, and 20 of a window of 5. Weights are saved once more in
    an average, and in a permanent checkpoint of weights alone.
    """
    big = resolve("olmo2-7b-lr", "full")
    train = {"nodes": 1, "ranks_per_node": None, "gpus_per_node": 8, "gpu_memory_gb": 141}

    def check(notice: int, speed: float, nodes: int = 1) -> None:
        site = changed(
            site_of(tmp_path),
            resources={"train": train | {"nodes": nodes}},
            limits={"stop_seconds_before_limit": notice},
            disk={"write_gb_per_second": speed},
        )
        check_time_to_save(big, site, training_layouts(big, site))

    message = (
        r"lr3e-4, asked to stop 300 s before its time limit, may have 526 GB to write on a node,"
        r" 526 s at 1 GB/s; set limits.stop_seconds_before_limit to 1052, "
    )
    assert 72 * parameter_count(big.trained[0]) / 1e9 == pytest.approx(525.5, abs=0.1)
    with pytest.raises(UserError, match=message):
        check(300, 1)
    check(1060, 1)
    check(300, 4)
    check(300, 1, nodes=8)
