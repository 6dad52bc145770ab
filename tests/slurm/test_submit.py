"""Submitting to a real SLURM: what is submitted, once, with which dependencies; and what is
refused.
"""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from base.errors import UserError
from base.files import write_json
from slurm import cluster
from slurm.site import Site
from slurm.submission.arrays import FINAL
from slurm.submission.record import (
    SLURM,
    SUBMISSION_JSON,
    existing_submission,
    read_submission,
    script_path,
    submitting,
    write_submission,
)
from slurm.submission.script import ranges
from slurm.submission.submit import (
    active_elements,
    dry_run,
    submit,
    training_layouts,
)
from study.definition import Study
from study.pipeline.ledger import Ledger
from study.pipeline.steps import steps_of
from study.recipes import resolve
from tests.slurm.lab import Lab, running
from tests.slurm.small_study import PROJECT, site_of, small_study
from tests.waiting import HANG_SECONDS
from train.planning.memory import rank_memory


@pytest.fixture
def full(lab):
    """A lab on which nothing of these tests starts."""
    lab.command("scontrol", "update", "PartitionName=train", "State=DOWN")
    yield lab
    lab.command("scontrol", "update", "PartitionName=train", "State=UP")


@pytest.fixture
def study() -> Study:
    return small_study("s", steps=24, runs=2, restart_every=None, curved=True)


@pytest.fixture
def submitted(full, tmp_path, study):
    site = site_of(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    counts = submit(study, site)
    directory = tmp_path / "runs" / study.name
    yield directory, site, counts
    for job in existing_submission(directory).jobs:
        cluster.cancel([str(job.id)])


def complete(directory, study: Study, *names: str) -> None:
    """Records steps as the ledger does when they ended well."""
    ledger = Ledger(directory, steps_of(study))
    for name in names:
        step = ledger.steps[name]
        for place in (*ledger.reads(step), *step.outputs):
            (directory / place).parent.mkdir(parents=True, exist_ok=True)
            if not (directory / place).exists():
                write_json(directory / place, {"of": place})
        ledger.finish(step, ledger.fingerprint(step), 1.0)


def test_everything_is_submitted_once(submitted, study):
    directory, site, counts = submitted
    steps = steps_of(study)
    made = sum(counts[name] for name in counts if name not in (FINAL, "settle-train"))
    # two runs, two checkpoints, one group of specs: text, three token files, and per run or
    # checkpoint an element
    assert counts["train"] == 2
    assert counts["export"] == counts["quantize-1"] == counts["curvature"] == 4
    assert made == 1 + 3 + 2 + 3 * 4
    assert len(active_elements(existing_submission(directory))) == made + 2
    assert {step.name for step in steps} == {
        name
        for array in existing_submission(directory).job_arrays.values()
        for element in array.elements
        for name in element
        if name != "settle"
    }
    jobs = existing_submission(directory).jobs
    assert submit(study, site) == {}
    assert existing_submission(directory).jobs == jobs
    known = cluster.states({job.id for job in jobs})
    held = {name for name, state in known.items() if state.reason == "JobHeldUser"}
    export = next(job for job in jobs if job.array == "export")
    assert held == {f"{export.id}_{index}" for index in range(4)}
    shown = subprocess.run(
        ["scontrol", "show", "job", str(next(job.id for job in jobs if job.array == "quantize-1"))],
        capture_output=True,
        text=True,
    ).stdout
    assert f"Dependency=aftercorr:{export.id}_*" in shown


def test_an_interrupted_submission_goes_on(submitted, study):
    directory, site, _ = submitted
    submission = existing_submission(directory)
    kept = tuple(job for job in submission.jobs if job.array in ("text", "prepare"))
    lost = [job.id for job in submission.jobs if job not in kept and job.array != "train"]
    cluster.cancel([str(job) for job in lost])
    # killed while it submitted `train`: the job is there, the record says only that sbatch was
    # called
    write_submission(directory, submission.model_copy(update={"jobs": kept, "submitting": "train"}))
    train = next(job.id for job in submission.jobs if job.array == "train")
    counts = submit(study, site)
    assert set(counts) == {
        name for name in submission.job_arrays if name not in ("text", "prepare")
    }
    state = cluster.states({train})
    assert all(one.state == "CANCELLED" for one in state.values()), "not two jobs for one training"
    assert existing_submission(directory).submitting is None


def test_what_is_complete_is_neither_submitted_nor_waited_for(full, tmp_path, study):
    root = tmp_path / "runs"
    directory = root / study.name
    names = [step.name for step in steps_of(study)]
    run = study.runs[0].name
    done = [
        name
        for name in names
        if name.startswith(("corpus", "prepare", f"train-{run}", f"export-{run}-step00000012"))
    ]
    complete(directory, study, *done)
    counts = submit(study, site_of(root))
    jobs = {job.array: job for job in existing_submission(directory).jobs}
    try:
        assert "text" not in counts
        assert "prepare" not in counts
        assert jobs["train"].indices == (1,)
        assert jobs["export"].indices == (1, 2, 3)
        quantize = [job for job in existing_submission(directory).jobs if job.array == "quantize-1"]
        assert sorted(job.indices for job in quantize) == [
            (0,),
            (1, 2, 3),
        ], "one of them waits for nothing"
        # the other checkpoint of the finished run is there: its export need not wait for training
        known = cluster.states({jobs["export"].id})
        reasons = {name.partition("_")[2]: state.reason for name, state in known.items()}
        assert reasons["1"] != "JobHeldUser"
        assert reasons["2"] == reasons["3"] == "JobHeldUser"
    finally:
        cluster.cancel([str(job.id) for job in existing_submission(directory).jobs])


def test_only_retry_submits_what_failed(submitted, study):
    directory, site, _ = submitted
    train = next(job for job in existing_submission(directory).jobs if job.array == "train")
    cluster.cancel([f"{train.id}_1"])
    assert submit(study, site) == {}
    counts = submit(study, site, again=True)
    assert counts["train"] == 1
    assert counts[FINAL] == 1, "the last job waits for the new one, too"
    newest = existing_submission(directory).element_ids()
    assert newest["train", 0] == f"{train.id}_0"
    assert newest["train", 1] != f"{train.id}_1"


def test_two_submissions_at_once(full, tmp_path, study):
    directory = tmp_path / "runs" / study.name
    with submitting(directory), pytest.raises(UserError, match="another command is submitting"):
        submit(study, site_of(tmp_path / "runs"))
    assert read_submission(directory) is None


def test_a_record_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / SLURM / SUBMISSION_JSON
    path.parent.mkdir()
    path.write_bytes(b'{"site": "\xff')
    with pytest.raises(UserError, match="is not valid JSON"):
        read_submission(tmp_path)


def test_nothing_is_submitted_where_something_is_wrong(full, tmp_path, study):
    root = tmp_path / "runs"
    root.mkdir()
    site = site_of(root)

    def with_train(**changes):
        train = site.resources.train.model_copy(update=changes)
        return site.model_copy(
            update={"resources": site.resources.model_copy(update={"train": train})}
        )

    huge = site.model_copy(update={"disk": site.disk.model_copy(update={"reserve_gb": 1e9})})
    for wrong, reason in (
        (
            with_train(partition="nowhere"),
            "Invalid partition name specified; correct the site file",
        ),
        (with_train(nodes=99), "Requested node configuration|nodes"),
        (huge, "free space, take a root on another"),
    ):
        with pytest.raises(UserError, match=reason):
            submit(study, wrong)
        recorded = read_submission(root / study.name)
        assert recorded is None or recorded.jobs == ()


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
        counts = submit(study, site)
        assert max(counts.values()) == 150
        assert [counts[f"export.{part}"] for part in (1, 2, 3)] == [150, 150, 100]
        measuring = sum(
            count for name, count in counts.items() if name.startswith(("quantize", "curvature"))
        )
        assert measuring == 400 * (3 + 1)
        assert submit(study, site) == {}
        known = cluster.states({job.id for job in existing_submission(tmp_path / "many").jobs})
        assert len(known) == sum(counts.values())


def test_a_dry_run_needs_no_slurm_and_writes_nothing(tmp_path, study, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    texts = list(dry_run(study, site_of(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()
    scripts = {text.partition("\n")[0].split()[-1]: text.partition("\n")[2] for text in texts}
    names = {path.rpartition("/")[2] for path in scripts}
    assert {"train.sh", "export.sh", "quantize-1.sh", "final.sh"} <= names
    held = [text for text in texts if "--hold" in text.partition("\n")[0]]
    assert len(held) == 1
    assert "--dependency=aftercorr:<export> --kill-on-invalid-dep=yes" in "\n".join(texts)


def test_the_scripts_lie_in_the_study_as_submitted(submitted, study):
    directory, site, counts = submitted
    printed = {
        text.partition("\n")[0].split()[-1]: text.partition("\n")[2]
        for text in dry_run(study, site)
    }
    for name in counts:
        assert (
            script_path(directory, name).read_text() == printed[str(script_path(directory, name))]
        )
    assert json.loads((directory / "slurm/scripts/environment.json").read_text())["python"]
    assert not (directory / "slurm/starts").exists()


def test_indices_are_written_as_ranges():
    assert ranges([0]) == "0"
    assert ranges([3, 2, 1, 0]) == "0-3"
    assert ranges([0, 2, 3, 5]) == "0,2-3,5"


def test_two_processes_that_submit_at_once_submit_once(full, tmp_path, study):
    root = tmp_path / "runs"
    root.mkdir()
    code = (
        "import sys; from pathlib import Path\n"
        "from slurm.submission.submit import submit\n"
        "from tests.slurm.small_study import site_of, small_study\n"
        "from base.errors import UserError\n"
        "try:\n"
        "    study = small_study('s', steps=24, runs=2, restart_every=None, curved=True)\n"
        "    print(len(submit(study, site_of(Path(sys.argv[1])))))\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(root)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = sorted(process.communicate(timeout=HANG_SECONDS)[0].strip() for process in both)
    jobs = existing_submission(root / "s").jobs
    try:
        assert len({job.array for job in jobs}) == len(jobs)
        assert said[0] in ("0", str(len(jobs))) or "another command" in said[1]
        assert str(len(jobs)) in said
    finally:
        cluster.cancel([str(job.id) for job in jobs])


def test_retry_releases_what_a_node_could_not_start(submitted, study, monkeypatch, capsys):
    directory, site, _ = submitted
    train = existing_submission(directory).element_ids()["train", 1]
    known = cluster.states({job.id for job in existing_submission(directory).jobs})
    # as SLURM says it after a failed prolog, which the lab has not
    known[train] = replace(known[train], state="PENDING", reason="launch failed requeued held")
    released: list[str] = []
    monkeypatch.setattr(cluster, "states", lambda ids: known)
    monkeypatch.setattr(cluster, "release", released.extend)
    assert submit(study, site) == {}
    assert released == []
    submit(study, site, again=True)
    assert released[:1] == [train]
    assert "which a node could not start" in capsys.readouterr().err


def test_layouts_follow_from_the_gpus_that_a_site_states(tmp_path):
    big = resolve("olmo2-7b-lr", "full")

    def site(nodes: int, gpus: int, memory_gb: float | None) -> Site:
        site = site_of(tmp_path)
        train = {
            "nodes": nodes,
            "gpus_per_node": gpus,
            "ranks_per_node": None,
            "gpu_memory_gb": memory_gb,
        }
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
