"""What a job does with its steps, with stand-ins for srun, scontrol and the interpreter that
measures.
"""

import json
import sys
from pathlib import Path

import pytest
import typer

from base.errors import UserError
from base.files import write_json
from slurm.job import element, stop_files, supervision
from slurm.site import Limits
from slurm.submission.arrays import FINAL, arrays_of
from slurm.submission.record import Job, Submission, existing_submission, write_submission
from slurm.submission.submit import write_scripts
from study.definition import save_study
from study.pipeline.ledger import Ledger
from study.pipeline.steps import steps_of
from study.recipes import resolve
from tests.slurm.small_study import PROJECT, site_of
from train.run.directory import RunDirectory

# Does what the step of this command would leave behind, or fails as TO_FAIL says.
INTERPRETER = f"""#!{sys.executable}
import os, sys
sys.path.insert(0, {str(PROJECT)!r})
from pathlib import Path
from study.pipeline.step import Machine, batches, resolve, shared
from study.definition import load_study
from study.pipeline.steps import steps_of
from base.files import write_json
study_dir = Path(os.environ["STUDY_DIR"])
study = load_study(study_dir)
machine = Machine(python=sys.argv[0])
for batch in batches(steps_of(study), 1, 4):
    if resolve(shared(batch), study_dir, machine) == sys.argv:
        names = [step.name for step in batch]
        with (study_dir / "ran.txt").open("a") as log:
            log.write(names[0] + "\\n")
        if names[0] in os.environ.get("TO_FAIL", "").split():
            print("error: this measurement is refused; choose another", file=sys.stderr)
            sys.exit(2)
        for step in batch:
            for output in step.outputs:
                (study_dir / output).parent.mkdir(parents=True, exist_ok=True)
                write_json(study_dir / output, {{"of": step.name}})
"""
SRUN = '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'
SCONTROL = '#!/bin/sh\necho "$@" >> "$STUDY_DIR/scontrol.txt"\n'


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A submitted smoke study whose last exports are there; returns its directory."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("python", INTERPRETER), ("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    study = resolve("tiny", "smoke")
    directory = tmp_path / "runs" / study.name
    save_study(directory, study)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("STUDY_DIR", str(directory))
    for name, value in {
        "ARRAY_JOB_ID": "70",
        "ARRAY_TASK_ID": "1",
        "JOB_ID": "71",
        "JOB_NODELIST": "n1",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(supervision, "REQUEUED_SECONDS", 0)
    monkeypatch.setattr(element, "PAUSE_SECONDS", 0)
    site = site_of(tmp_path / "runs", train_nodes=1).model_copy(
        update={"python": programs / "python"}
    )
    arrays = arrays_of(study, Limits())
    jobs = tuple(
        Job(array=one.name, id=70, indices=(0, 1), time=0.0) for one in arrays if one.name == "ends"
    )
    write_scripts(directory, site, arrays)
    (directory / "slurm" / "released").mkdir()
    write_submission(directory, Submission(site=site, arrays=tuple(arrays), jobs=jobs))
    ledger = Ledger(directory, steps_of(study))
    for step in ledger.steps.values():
        if step.kind in ("corpus", "prepare", "train", "export"):
            for output in step.outputs:
                (directory / output).parent.mkdir(parents=True, exist_ok=True)
                write_json(directory / output, {"of": output})
    return directory


def ran(directory: Path) -> list[str]:
    path = directory / "ran.txt"
    return path.read_text().split() if path.exists() else []


def run(directory: Path, array: str = "ends", index: int = 1) -> None:
    element.run_element(directory, array, index, directory / "stop")


def steps_at_the_end(directory: Path) -> dict[str, bool]:
    """Steps of the element -> whether each is complete."""
    ledger = Ledger(directory, steps_of(resolve("tiny", "smoke")))
    kinds = ("blocks", "methods", "step", "slice")
    names = [
        name for name, step in ledger.steps.items() if step.kind in kinds and step.run == "lr3e-2"
    ]
    return {name: ledger.is_complete(ledger.steps[name]) for name in names}


def test_every_step_of_an_element_is_done_and_recorded_once(cluster):
    run(cluster)
    assert all(steps_at_the_end(cluster).values())
    assert len(ran(cluster)) == len(set(ran(cluster)))
    before = ran(cluster)
    run(cluster)
    assert ran(cluster) == before


def test_a_job_on_gpus_gives_each_step_what_it_can_use(cluster, monkeypatch):
    submission = existing_submission(cluster)
    four = {"gpus_per_node": 4, "ranks_per_node": None, "gpu_memory_gb": 80.0}
    quantize = submission.site.resources.quantize.model_copy(update=four)
    kinds = submission.site.resources.model_copy(update={"quantize": quantize})
    site = submission.site.model_copy(update={"resources": kinds})
    write_submission(cluster, submission.model_copy(update={"site": site}))
    one = element._Element(cluster, "ends", 1, cluster / "stop", "70_1")
    machines = {step.kind: one.machine(step) for step in one.steps}
    assert "--nproc-per-node" in machines["blocks"].launch, (
        "four ranks share the rows of every weight"
    )
    for kind in ("methods", "step", "slice"):
        assert machines[kind].launch == ("{python}",)
    assert {(machine.device, machine.sharding) for machine in machines.values()} == {
        ("cuda", "none")
    }


def test_what_does_not_need_a_failed_step_is_done_and_the_element_alone_queued_again(
    cluster, monkeypatch
):
    monkeypatch.setenv("TO_FAIL", "methods-lr3e-2-int8-t6 methods-lr3e-2-rtn-b3-g32")
    with pytest.raises(typer.Exit):
        run(cluster)
    complete = steps_at_the_end(cluster)
    assert {name for name, done in complete.items() if not done} == {
        "methods-lr3e-2-rtn-b3-g32",
        "methods-lr3e-2-int8-t6",
    }
    # the other run's element can start, too: its export is there
    assert (cluster / "scontrol.txt").read_text().splitlines() == ["release 70_0", "requeue 70_1"]


def test_what_needs_a_failed_step_waits_and_three_starts_are_enough(cluster, monkeypatch):
    monkeypatch.setenv("TO_FAIL", "blocks-lr3e-2")
    for _ in range(4):  # the first one comes further: it completes what does not need the blocks
        with pytest.raises(typer.Exit):
            run(cluster)
    assert not {"step-lr3e-2", "slice-lr3e-2"} & set(ran(cluster))
    with pytest.raises(UserError, match="3 starts of ends/1 came no further"):
        run(cluster)
    assert (cluster / "scontrol.txt").read_text().count("requeue 70_1") == 4


def test_an_element_whose_input_is_missing_ends_with_a_line(cluster):
    for path in (cluster / "lr3e-2" / "hf").rglob("lineage.json"):
        path.unlink()
    with pytest.raises(
        UserError, match=r"lineage\.json is not there; what makes it failed, retry that first"
    ):
        run(cluster)
    assert ran(cluster) == []
    assert not (cluster / "scontrol.txt").exists()


def test_a_request_to_stop_leaves_the_rest_to_the_next_start(cluster):
    (cluster / "stop").touch()
    with pytest.raises(typer.Exit):
        run(cluster)
    assert len(ran(cluster)) <= 1
    assert "requeue 70_1" in (cluster / "scontrol.txt").read_text()
    (cluster / "stop").unlink()
    run(cluster)
    assert all(steps_at_the_end(cluster).values())


def test_a_stop_file_of_the_user_ends_a_training_and_ours_is_forgotten(cluster):
    directory = RunDirectory(cluster / "lr3e-2")
    directory.stop_file.write_text("slurm 70_1.0\n")
    stop_files.forget_stale_stops(
        cluster, [step for step in steps_of(resolve("tiny", "smoke")) if step.kind == "train"]
    )
    assert not directory.stop_file.exists()
    assert not stop_files.stopped_by_user(cluster, "lr3e-2")
    directory.stop_file.touch()
    assert stop_files.stopped_by_user(cluster, "lr3e-2")
    directory.stop_file.unlink()
    write_json(directory.status_json, {"status": "preempted", "reason": "asked to stop by STOP"})
    assert stop_files.stopped_by_user(cluster, "lr3e-2")


def test_the_table_is_made_of_what_there_is_and_is_not_complete_then(cluster):
    run(cluster, FINAL, 0)
    records = (
        [path.stem for path in (cluster / "steps").glob("*.json")]
        if (cluster / "steps").exists()
        else []
    )
    assert ran(cluster) == ["collect", "report", "mirror"]
    assert "collect" not in records, "results are missing: it is to be made again"
    assert (
        json.loads((cluster / "slurm" / "starts" / f"{FINAL}-0.json").read_text())[0]["restart"]
        == 0
    )


def test_an_unknown_element_is_refused(cluster):
    for array, index in (("nothing", 0), ("ends", 7)):
        with pytest.raises(UserError, match="has no element"):
            run(cluster, array, index)
