"""A job and its steps, with stand-ins for srun, sbatch and the interpreter that measures."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
import typer

import slurm.cluster
from base.errors import UserError
from slurm.job import element, supervision
from slurm.job.element import run_element
from slurm.site import JobLimits
from slurm.status.overview import look
from slurm.status.table import lines_of
from slurm.submission.advance import advance
from slurm.submission.arrays import FINAL, arrays_of
from slurm.submission.record import (
    existing_submission,
    record_end,
    record_start,
    starts_of,
    write_plan,
)
from slurm.submission.submit import write_scripts
from study.definition import save_study
from study.pipeline.ledger import Ledger
from study.recipes.resolve import resolve
from study.steps import steps_of
from tests import faulty_filesystem
from tests.interpreter import interpreter
from tests.lacking import skip
from tests.runs import write_program
from tests.sealing import write_ending
from tests.slurm.studies import changed, in_state, make, record_call, site_of
from train.run.directory import RunDirectory

# Forked: an interpreter of its own would import for a second, at every step.
END = 2  # of the elements of `ends`: that of lr3e-2, after lr3e-3 and its control
PYTHON = '#!/bin/sh\nexec {} -m tests.slurm.stand_in "$0" "$@"\n'
SRUN = """#!/bin/sh
echo "$@" >> "$STUDY_DIR/srun.txt"
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
# Knows no job, and gives numbers to new ones.
SBATCH = """#!/bin/sh
echo "$@" >> "$STUDY_DIR/sbatch.txt"
echo $((100 + $(wc -l < "$STUDY_DIR/sbatch.txt")))
"""
SQUEUE = """#!/bin/sh
case "$*" in *--jobs=*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1;; esac
"""
SACCT = "#!/bin/sh\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n"


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A submitted smoke study whose last exports are there; returns its directory."""
    programs = tmp_path / "bin"
    stand_ins = {"python": PYTHON.format(interpreter()), "srun": SRUN, "sbatch": SBATCH}
    stand_ins |= {"squeue": SQUEUE, "sacct": SACCT}
    for name, text in stand_ins.items():
        write_program(programs / name, text)
    study = resolve("tiny", "smoke")
    directory = tmp_path / "runs" / study.name
    save_study(directory, study)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("STUDY_DIR", str(directory))
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n1")
    monkeypatch.setattr(element, "RESTART_SECONDS", 0)
    monkeypatch.setattr(element, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(element, "CACHED_SECONDS", 0)
    monkeypatch.setattr(supervision, "TRY_SECONDS", 0)
    site = changed(site_of(tmp_path / "runs", train_nodes=1), python=programs / "python")
    arrays = arrays_of(study, JobLimits())
    write_scripts(directory, site, arrays)
    write_plan(directory, site, arrays, anew=True)
    there = ("corpus", "prepare", "train", "export")
    make(directory, study, [step.name for step in steps_of(study) if step.kind in there])
    return directory


def ran(directory: Path) -> list[str]:
    path = directory / "ran.txt"
    return path.read_text().split() if path.exists() else []


def run(directory: Path, array: str = "ends", index: int = END, job: str | None = None) -> None:
    """Run an element as a job: else its newest, which is job 70 if it has none."""
    newest = existing_submission(directory).element_ids.get((array, index))
    if newest is None:
        record_call(directory, array, 70, [index])
    job = job or (newest or "70").partition("_")[0]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLURM_ARRAY_JOB_ID", job)
        environment.setenv("SLURM_ARRAY_TASK_ID", str(index))
        run_element(directory, array, index, directory / "stop")


def again(directory: Path, array: str = "ends", index: int = END) -> int:
    """The number of times that an element was submitted again."""
    return len(existing_submission(directory).jobs_of.get((array, index), ())) - 1


def steps_at_the_end(directory: Path) -> dict[str, bool]:
    """Steps of the element -> whether each is complete."""
    ledger = Ledger(directory, steps_of(resolve("tiny", "smoke")))
    kinds = ("blocks", "methods", "step", "slice")
    names = [
        name for name, step in ledger.steps.items() if step.kind in kinds and step.run == "lr3e-2"
    ]
    return {name: ledger.is_complete(ledger.steps[name]) for name in names}


def test_options_of_the_site_reach_every_srun_before_the_projects(cluster):
    submission = existing_submission(cluster)
    options = ("--mpi=pmix", "--cpu-bind=none")
    site = changed(submission.site, slurm={"srun_options": options})
    write_plan(cluster, site, submission.arrays, anew=True)
    run(cluster)
    calls = (cluster / "srun.txt").read_text().splitlines()
    assert len(calls) == len(ran(cluster))
    expected = "--kill-on-bad-exit=1 --mpi=pmix --cpu-bind=none --nodes=1 --ntasks=1 "
    assert all(call.startswith(expected) for call in calls)


def test_every_step_of_an_element_is_done_and_recorded_once(cluster):
    run(cluster)
    assert all(steps_at_the_end(cluster).values())
    assert len(ran(cluster)) == len(set(ran(cluster)))
    before = ran(cluster)
    run(cluster)
    assert ran(cluster) == before


@pytest.mark.parametrize("says", [{}, {"HF_HUB_OFFLINE": "1"}])
def test_what_asks_the_hub_reaches_it_unless_the_site_has_it_cached(cluster, monkeypatch, says):
    submission = existing_submission(cluster)
    site = changed(submission.site, environment=submission.site.environment | says)
    write_plan(cluster, site, submission.arrays, anew=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # as in every job
    monkeypatch.setattr(element, "ONLINE", {"blocks"})
    offline: dict[bool, str | None] = {}

    def watched(command, environment, *more, **named):
        offline["--per-block" in command] = environment.get("HF_HUB_OFFLINE")
        return supervision.wait_for(command, environment, *more, **named)

    monkeypatch.setattr(element, "wait_for", watched)
    run(cluster)
    assert offline == {True: says.get("HF_HUB_OFFLINE"), False: "1"}


def test_a_job_on_gpus_gives_each_step_what_it_can_use(cluster):
    submission = existing_submission(cluster)
    four = {"gpus_per_node": 4, "ranks_per_node": None, "gpu_memory_gb": 80.0}
    site = changed(submission.site, resources={"quantize": four})
    write_plan(cluster, site, submission.arrays, anew=False)
    array_element = element.ElementStart(cluster, "ends", END, cluster / "stop", "70_1")
    machines = {step.kind: array_element.machine(step) for step in array_element.steps}
    for kind in ("blocks", "slice"):  # ranks share the rows of weights, and of the grid
        assert "--nproc-per-node" in machines[kind].launch
    for kind in ("methods", "step"):
        assert machines[kind].launch == ("{python}",)
    assert {(machine.device, machine.sharding) for machine in machines.values()} == {
        ("cuda", "none")
    }


def test_what_does_not_need_a_failed_step_is_done_and_the_element_submitted_again(
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
    assert starts_of(cluster, ("ends", END))[-1]["ended"] == "failed"
    assert again(cluster) == 1
    # With what else can start, but not what reads measurements that are not there.
    assert (FINAL, 0) not in existing_submission(cluster).element_ids


def test_the_second_of_two_that_are_given_up_at_once_submits_the_table(cluster, monkeypatch):
    """While SLURM completes the first one, which has submitted for the last time."""
    submission, study = existing_submission(cluster), resolve("tiny", "smoke")
    site = changed(submission.site, limits={"starts_without_progress": 1})
    write_plan(cluster, site, submission.arrays, anew=False)
    ends = submission.job_arrays["ends"].elements
    # What does not need the blocks is complete: a start that makes nothing is no progress.
    last = {name for name in (*ends[0], *ends[END]) if not name.startswith("methods")}
    last |= {*submission.job_arrays[FINAL].elements[0]}
    make(cluster, study, [step.name for step in steps_of(study) if step.name not in last])
    monkeypatch.setenv("TO_FAIL", "blocks-lr3e-3 blocks-lr3e-2")
    record_call(cluster, "ends", 70, [0, END])
    known = dict.fromkeys(("70_0", f"70_{END}"), in_state("RUNNING"))
    monkeypatch.setattr(slurm.cluster, "states", lambda ids: known)
    for index in (0, END):
        assert (FINAL, 0) not in existing_submission(cluster).element_ids
        with pytest.raises(typer.Exit):
            run(cluster, index=index)
    assert (FINAL, 0) in existing_submission(cluster).element_ids


def test_what_needs_a_failed_step_waits_and_three_starts_are_enough(cluster, monkeypatch):
    monkeypatch.setenv("TO_FAIL", "blocks-lr3e-2")
    for _ in range(4):  # the first one comes further: it completes what does not need the blocks
        with pytest.raises(typer.Exit):
            run(cluster)
    assert not {"step-lr3e-2", "slice-lr3e-2"} & set(ran(cluster))
    assert again(cluster) == 3, "after the fourth start it is given up"


@pytest.mark.parametrize(
    ("ran_seconds", "submissions"),
    [
        ("3590", 3),  # of an hour, less the ten seconds before its end
        ("3540", 3),  # SLURM's signal is up to a minute early
        ("600", 5),  # preempted
        ("", 5),  # the disk was full
    ],
)
def test_a_step_that_does_not_fit_the_time_limit_is_given_up_and_a_preempted_one_never(
    cluster, monkeypatch, capsys, ran_seconds, submissions
):
    monkeypatch.setenv("TO_FAIL", "blocks-lr3e-2")
    with pytest.raises(typer.Exit):
        run(cluster)  # completes all else
    (cluster / "stop").write_text(ran_seconds)
    for _ in range(4):
        with suppress(typer.Exit):
            run(cluster)
    assert again(cluster) == submissions
    advice = (
        "error: blocks-lr3e-2 made nothing within the time limit of 60; raise"
        " resources.quantize.time in the site file, then 'python -m slurm retry tiny-smoke"
        " --site FILE'\n"
    )
    assert (advice in capsys.readouterr().out) == (submissions == 3)


@pytest.mark.parametrize(("word", "submissions"), [("OUT_OF_MEMORY", 2), ("PREEMPTED", 4)])
def test_a_start_that_was_killed_counts_by_what_slurm_said_of_it(
    cluster, monkeypatch, word, submissions
):
    """Each is killed before it can record its end, and forgotten once the next one has ended."""
    record_call(cluster, "ends", 70, [END])
    for _ in range(4):
        newest = existing_submission(cluster).element_ids["ends", END]
        known = {newest: in_state(word, code="0:9")}
        monkeypatch.setattr(slurm.cluster, "states", lambda ids, known=known: known)
        record_start(cluster, ("ends", END), newest, nodes=1, position=0)
        advance(cluster)
    assert again(cluster) == submissions


def test_an_element_whose_input_is_missing_ends_with_a_line(cluster, capsys):
    for path in (cluster / "lr3e-2" / "hf").rglob("lineage.json"):
        path.unlink()
    with pytest.raises(typer.Exit):
        run(cluster)
    assert "lineage.json, which is not there" in capsys.readouterr().out
    assert ran(cluster) == []
    assert again(cluster) == 0, "not before it is there"


def test_a_request_to_stop_leaves_the_rest_to_the_next_start(cluster):
    (cluster / "stop").touch()
    run(cluster)
    assert len(ran(cluster)) <= 1
    assert starts_of(cluster, ("ends", END))[-1]["ended"] == "asked"
    assert again(cluster) == 1
    (cluster / "stop").unlink()
    run(cluster)
    assert all(steps_at_the_end(cluster).values())


def test_a_job_that_is_not_the_newest_of_its_element_leaves(cluster, monkeypatch, capsys):
    record_call(cluster, "ends", 70, [END])
    record_call(cluster, "ends", 80, [END])
    run(cluster, job="70")
    assert ran(cluster) == []
    assert f"another job runs ends/{END}" in capsys.readouterr().out
    assert starts_of(cluster, ("ends", END)) == []


TRAIN = "train-lr3e-2"


@pytest.fixture
def training(cluster, monkeypatch):
    """A study whose second run is not trained; how often it was started is in ran.txt."""
    ledger = Ledger(cluster, steps_of(resolve("tiny", "smoke")))
    for output in ledger.steps[TRAIN].outputs:
        (cluster / output).unlink()
    (ledger.records / f"{TRAIN}.json").unlink()
    monkeypatch.setenv("TO_FAIL", TRAIN)
    monkeypatch.setattr(element.ElementStart, "follow", lambda _self, _step: None)
    return cluster


def test_a_training_is_resumed_in_place_and_then_submitted_again(training):
    with pytest.raises(typer.Exit):
        run(training, "train", 1)
    assert ran(training) == [TRAIN] * 4, "three times more on the same nodes"
    assert again(training, "train", 1) == 1
    with pytest.raises(typer.Exit):
        run(training, "train", 1)
    with pytest.raises(typer.Exit):
        run(training, "train", 1)
    assert again(training, "train", 1) == 2, "three starts without progress"


def test_a_training_that_diverged_has_ended_and_nothing_waits_for_it(training, monkeypatch):
    """The same definition as the local runner's: it is not resumed, nor submitted again."""
    monkeypatch.delenv("TO_FAIL")
    monkeypatch.setenv("TO_DIVERGE", TRAIN)
    run(training, "train", 1)
    assert ran(training) == [TRAIN]
    assert starts_of(training, ("train", 1))[-1]["ended"] == "complete"
    assert again(training, "train", 1) == 0
    run(training, "train", 1)
    assert ran(training) == [TRAIN], "not retried"

    # what its checkpoints were for is left out: no element of its end is open
    overview = look(training)
    assert overview.trainings["lr3e-2"].ending == "diverged"
    assert overview.situations[TRAIN] == "made"
    ends = [step for step in overview.steps if step.run == "lr3e-2" and step.kind == "methods"]
    assert {overview.situations[step.name] for step in ends} == {"left out"}
    assert f"ends/{END}" not in {element.name for element in overview.elements}
    lines = "\n".join(lines_of(overview))
    assert re.search(r"^lr3e-2 +diverged ", lines, re.MULTILINE)
    assert "left out" in lines


def test_who_stopped_an_earlier_attempt_says_nothing_of_this_one(training):
    """As after a time limit: the job asked, the run was saved; the next start fails at once."""
    directory = RunDirectory(training / "lr3e-2")
    write_ending(directory, "preempted", asked_by="slurm 70_1.0")
    with pytest.raises(typer.Exit):
        run(training, "train", 1)
    assert starts_of(training, ("train", 1))[-1]["ended"] == "failed"
    write_ending(directory, "preempted", asked_by="user")
    with pytest.raises(typer.Exit):
        run(training, "train", 1)
    assert starts_of(training, ("train", 1))[-1]["ended"] == "failed"
    assert again(training, "train", 1) == 2


def test_a_stop_of_the_user_ends_a_training_until_a_retry(training, capsys):
    (training / "lr3e-2" / "STOP").touch()
    run(training, "train", 1)
    assert starts_of(training, ("train", 1))[-1]["ended"] == "stopped"
    assert "'python -m slurm retry tiny-smoke' resumes" in capsys.readouterr().out
    assert again(training, "train", 1) == 0


@pytest.mark.parametrize(
    ("asked_by", "who"),
    [
        ("slurm 70_1.0", "job"),
        ("SIGTERM", "job"),
        ("a signal to another rank", "job"),
        ("user", "user"),
        ("maria, for the maintenance", "user"),
        (None, None),
    ],
)
def test_who_stopped_a_training(training, asked_by, who):
    step = next(step for step in steps_of(resolve("tiny", "smoke")) if step.name == TRAIN)
    directory = RunDirectory(training / "lr3e-2")
    write_ending(directory, "preempted", asked_by=asked_by)
    assert supervision.stopped_by(training, step) == who


def test_a_stop_file_of_ours_is_forgotten_by_the_next_start(training):
    directory = RunDirectory(training / "lr3e-2")
    directory.stop_file.write_text("slurm 70_1.0\n")
    with pytest.raises(typer.Exit):
        run(training, "train", 1)
    assert not directory.stop_file.exists()
    assert len(ran(training)) == 4


def test_the_table_is_made_of_what_there_is_and_is_not_complete_then(cluster):
    run(cluster, FINAL, 0)
    assert ran(cluster) == ["collect", "report", "mirror"]
    made_again = "results are missing: it is to be made again"
    assert not (cluster / "steps/collect.json").exists(), made_again
    assert starts_of(cluster, (FINAL, 0))[-1]["ended"] == "partial"


@pytest.mark.parametrize(("array", "index"), [("ends", END), (FINAL, 0)])
def test_what_another_node_has_made_is_waited_for(cluster, monkeypatch, array, index):
    """This node has looked before it was there, and knows for two seconds that it is not."""
    if reason := faulty_filesystem.missing():
        skip(f"no filesystem of the tests here: {reason}")
    root, study = cluster.parent, resolve("tiny", "smoke")
    backing = root.rename(root.with_name("backing"))
    finals = ("collect", "report", "mirror")
    before = [step for step in steps_of(study) if step.kind not in finals]
    if array == FINAL:
        make(backing / study.name, study, [step.name for step in before])
        for other in existing_submission(backing / study.name).arrays:
            for element_index in range(len(other.elements)):
                key = (other.name, element_index)
                record_start(backing / study.name, key, f"9_{element_index}", 1, 0)
                record_end(backing / study.name, key, f"9_{element_index}", "complete")
    monkeypatch.setattr(element, "CACHED_SECONDS", 60)
    caching = faulty_filesystem.Behaviour(cache_seconds=2)
    with faulty_filesystem.mounted(backing, root, caching):
        made = [backing / study.name / name for step in before for name in step.outputs]
        made = [path for path in made if path.exists() and path.name != "checkpoint.json"]
        for path in made:
            path.rename(path.with_name("aside"))
            assert not (root / path.relative_to(backing)).is_file()
            path.with_name("aside").rename(path)
        run(cluster, array, index)
        assert starts_of(cluster, (array, index))[-1]["ended"] == "complete"


def test_an_unknown_element_is_refused(cluster, capsys):
    for array, index in (("nothing", 0), ("ends", 7)):
        with pytest.raises(UserError, match="has no element"):
            element.ElementStart(cluster, array, index, cluster / "stop", f"70_{index}")
    with pytest.raises(typer.Exit):
        run(cluster, "nothing", 0)  # recorded as submitted
    assert "is of nothing/0, which the study has not" in capsys.readouterr().out
