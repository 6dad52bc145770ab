"""Submitting to a real SLURM: what is submitted, and when; and what is refused."""

import json
import subprocess
from typing import Any

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
    read_submission,
    script_path,
    submitting,
    unexclude,
)
from slurm.submission.submit import dry_run, submit, training_layouts
from slurm.submission.survey import survey
from study.definition import Study, save_study
from study.pipeline.ledger import Ledger
from study.recipes.resolve import resolve
from study.steps import steps_of
from tests.interpreter import interpreter
from tests.slurm.lab import Lab, running
from tests.slurm.studies import PROJECT, site_of, small_study
from tests.waiting import HANG_SECONDS
from train.planning.memory import rank_memory

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
def root(tmp_path):
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def complete(directory, study: Study, *begins: str) -> None:
    """Records steps, by the beginnings of their names, as the ledger does when they ended well."""
    ledger = Ledger(directory, steps_of(study))
    for name in (name for name in ledger.steps if name.startswith(begins)):
        step = ledger.steps[name]
        for name in (*ledger.reads(step), *step.outputs):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            if not (directory / name).exists():
                write_json(directory / name, {"of": name})
        ledger.finish(step, ledger.fingerprint(step), 1.0)


def jobs_of(directory) -> list[tuple[str, tuple[int, ...]]]:
    return [(job.array, job.indices) for job in existing_submission(directory).jobs]


def in_queue(name: str) -> set[str]:
    """The elements that SLURM has of jobs of a name."""
    command = ["squeue", "--noheader", "--array", f"--name={name}", "-o", "%F_%K"]
    return set(subprocess.check_output(command, text=True).split())


def test_what_can_start_is_submitted_once_and_waits_for_nothing(full, root, study):
    site, directory = site_of(root), root / study.name
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


def test_a_call_whose_answer_was_lost_is_found_by_its_token(full, root, study):
    directory = root / study.name
    submit(study, site_of(root))
    jobs = directory / SLURM / JOBS_JSONL
    kept = jobs.read_text().splitlines(keepends=True)[:-1]
    jobs.write_text("".join(kept))
    before = in_queue("s.text")
    assert submit(study, site_of(root)) == {}
    assert in_queue("s.text") == before
    assert len(existing_submission(directory).jobs) == 1


def test_a_call_that_never_came_about_is_made_again(full, root, study):
    directory = root / study.name
    submit(study, site_of(root))
    complete(directory, study, *TEXT)
    call = {"token": "quantdyn:none", "array": "train", "indices": [0, 1], "script": "0" * 16}
    append(directory, "calling", **call, time=0.0)
    assert advance(directory) == {"train": 2}


def test_another_root_with_a_study_of_the_same_name_is_left_alone(full, tmp_path, study):
    here, there = tmp_path / "here", tmp_path / "there"
    for root in (here, there):
        root.mkdir()
        submit(study, site_of(root))
    both = in_queue("s.text")
    assert len(both) == 2
    call = {"token": "quantdyn:none", "array": "text", "indices": [0], "script": "0" * 16}
    append(here / "s", "calling", **call, time=0.0)
    submit(study, site_of(here))
    cancel(here / "s")
    (left,) = in_queue("s.text")
    assert left == existing_submission(there / "s").element_ids["text", 0]


def test_an_edited_site_file_acts_on_what_waits(full, root, study):
    directory = root / study.name
    submit(study, site_of(root))
    complete(directory, study, *TEXT)
    advance(directory)
    before = in_queue("s.train")
    assert submit(study, site_of(root)) == {}, "the same site"
    assert submit(study, site_of(root, train_minutes=30)) == {"train": 2}
    after = in_queue("s.train")
    assert len(after) == 2
    assert not after & before
    assert "TimeLimit=00:30:00" in full.command("scontrol", "show", "job", min(after))
    assert advance(directory) == {}


def test_what_the_user_cancelled_comes_back_by_retry_alone(full, root, study):
    directory, site = root / study.name, site_of(root)
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


def test_a_cancelled_study_stays_cancelled(full, root, study):
    directory = root / study.name
    submit(study, site_of(root))
    cancel(directory)
    complete(directory, study, *TEXT)
    assert advance(directory) == {}
    assert submit(study, site_of(root), again=True) == {"train": 2}


def test_excluded_nodes_are_those_of_the_site_and_of_the_study(full, root, study):
    directory, site = root / study.name, site_of(root)
    options = site.slurm.model_copy(update={"exclude": "node4"})
    submit(study, site.model_copy(update={"slurm": options}))
    complete(directory, study, *TEXT)
    exclude(directory, {"node2": "no GPU"})
    advance(directory)
    job = existing_submission(directory).element_ids["train", 0]
    assert "ExcNodeList=node[2,4]" in full.command("scontrol", "show", "job", job)
    unexclude(directory, ["node2"])
    submit(study, site.model_copy(update={"slurm": options}))
    job = existing_submission(directory).element_ids["train", 0]
    assert "ExcNodeList=node4\n" in full.command("scontrol", "show", "job", job)
    with pytest.raises(UserError, match="node 'node2' is not excluded; take one of none"):
        unexclude(directory, ["node2"])


def test_no_more_is_queued_than_the_site_says(full, root, study):
    directory = root / study.name
    limits = {"max_queued": 5, "throttle": {"curvature": 1}}
    site = site_of(root)
    site = site.model_copy(update={"limits": site.limits.model_copy(update=limits)})
    submit(study, site)
    complete(directory, study, *TEXT, "train", "export")
    cluster.cancel([existing_submission(directory).element_ids["text", 0]])
    assert advance(directory) == {"quantize-1": 4, "curvature": 1}
    complete(directory, study, "quantize")
    first = existing_submission(directory).element_ids["quantize-1", 0]
    cluster.cancel([first.partition("_")[0]])
    assert advance(directory) == {}, "one of curvature is there"


def test_a_full_queue_is_filled_as_far_as_it_goes(full, root, study, monkeypatch):
    """A stand-in for the limit of a QOS: 3 jobs more."""
    directory, real, left = root / study.name, cluster.submit, [3]

    def limited(script, array, token):
        count = len(range(*_span(array)))
        if count > left[0]:
            raise cluster.SubmitLimitError("sbatch: QOSMaxSubmitJobPerUserLimit")
        left[0] -= count
        return real(script, array, token)

    submit(study, site_of(root))
    complete(directory, study, *TEXT, "train", "export")
    monkeypatch.setattr(cluster, "submit", limited)
    assert advance(directory) == {"quantize-1": 3}
    assert advance(directory) == {}
    left[0] = 10
    assert advance(directory) == {"quantize-1": 1, "curvature": 4}


def _span(array: str) -> tuple[int, int]:
    first, _, last = array.partition("-")
    return int(first), int(last or first) + 1


def test_a_full_queue_of_others_is_said(full, root, study, monkeypatch):
    def refused(script, array, token):
        raise cluster.SubmitLimitError("sbatch: full; lower limits.max_queued")

    monkeypatch.setattr(cluster, "submit", refused)
    with pytest.raises(UserError, match=r"lower limits\.max_queued"):
        submit(study, site_of(root))


def test_two_submissions_at_once(full, root, study, monkeypatch):
    monkeypatch.setattr(record, "PATIENCE_SECONDS", 0.5)
    directory = root / study.name
    with submitting(directory), pytest.raises(UserError, match="another command is submitting"):
        submit(study, site_of(root))
    assert read_submission(directory) is None


def test_a_line_that_was_cut_off_is_left_out_and_the_next_one_is_whole(full, root, study):
    directory = root / study.name
    submit(study, site_of(root))
    with (directory / SLURM / JOBS_JSONL).open("a") as file:
        file.write('{"event": "calling", "tok')
    append(directory, "cancelled", elements=[("text", 0)])
    submission = existing_submission(directory)
    assert len(submission.jobs) == 1
    assert submission.cancelled == {("text", 0)}


def test_nothing_is_submitted_where_something_is_wrong(full, root, study):
    site = site_of(root)

    def with_train(**changes):
        train = site.resources.train.model_copy(update=changes)
        return site.model_copy(
            update={"resources": site.resources.model_copy(update={"train": train})}
        )

    huge = site.model_copy(update={"disk": site.disk.model_copy(update={"reserve_gb": 1e9})})
    no_program = site.model_copy(update={"python": root / "python"})
    no_checkout = site.model_copy(update={"project": root})
    for wrong, reason in (
        (with_train(partition="nowhere"), "Invalid partition name specified; correct the site"),
        (with_train(nodes=99), "Requested node configuration|nodes"),
        (huge, "free space, take a root on another"),
        (no_program, "is not a program; correct python in"),
        (no_checkout, "is not a checkout of this project; correct"),
    ):
        with pytest.raises(UserError, match=reason):
            submit(study, wrong)
        recorded = read_submission(root / study.name)
        assert recorded is None or recorded.jobs == ()


def test_another_cut_has_to_wait_for_what_is_in_the_queue(full, root, study):
    site = site_of(root)
    limits = site.limits.model_copy(update={"specs_per_job": 1})
    other = site.model_copy(update={"limits": limits})
    submit(study, site)
    with pytest.raises(UserError, match=r"cut in another way; .* 'python -m slurm cancel s'"):
        submit(study, other)
    cancel(root / "s")
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
        site = site_of(tmp_path, train_nodes=1)
        limits = site.limits.model_copy(update={"max_queued": 2000})
        directory = tmp_path / study.name
        assert submit(study, site.model_copy(update={"limits": limits})) == {"text": 1}
        complete(directory, study, *TEXT, "train", "export")
        counts = advance(directory)
        assert max(counts.values()) == 150
        assert sum(counts.values()) == 400 * (3 + 1)
        assert advance(directory) == {}
        submission = existing_submission(directory)
        assert len(survey(directory, submission, study).active) == sum(counts.values())


def test_the_scripts_lie_in_the_study_as_submitted(full, root, study):
    site, directory = site_of(root), root / study.name
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


def test_two_processes_that_submit_at_once_submit_once(full, root, study, tmp_path):
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
            [interpreter(), "-c", code, str(tmp_path), site_of(root).model_dump_json()],
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = sorted(process.communicate(timeout=HANG_SECONDS)[0].strip() for process in both)
    assert jobs_of(root / "s") == [("text", (0,))]
    assert outputs[0] == "0" or "another command" in outputs[1]
    assert "1" in outputs


def test_layouts_follow_from_the_gpus_that_a_site_states(tmp_path):
    big = resolve("olmo2-7b-lr", "full")

    def site(nodes: int, gpus: int, memory_gb: float | None) -> Site:
        site = site_of(tmp_path)
        train: dict[str, Any] = {"nodes": nodes, "gpus_per_node": gpus, "ranks_per_node": None}
        train |= {"gpu_memory_gb": memory_gb}
        kinds = site.resources.model_copy(
            update={"train": site.resources.train.model_copy(update=train)}
        )
        return site.model_copy(update={"resources": kinds})

    layouts = training_layouts(big, site(2, 8, 141))
    assert layouts == {run.name: run for run in big.trained}, "the recipe's own layout fits"
    smaller = training_layouts(big, site(2, 8, 64))
    assert smaller is not None
    for run in smaller.values():
        assert rank_memory(run, 16).bytes <= 64e9
    assert training_layouts(big, site(1, 1, None)) is None, "nothing is known of them"
    with pytest.raises(UserError, match=r"1 nodes of 1 x GPU of 80 GB; .* 4 x h100, "):
        training_layouts(big, site(1, 1, 80))
