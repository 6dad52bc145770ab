"""A run that diverged is a result: it stops nothing else, and all that follows says so."""

from pathlib import Path

import pytest

from base.frozen import fingerprint
from dynamics.choices.learning_rate import answers
from dynamics.claims.page import claims_table, judge_all
from dynamics.claims.verdict import Evidence
from dynamics.recipes import resolve
from study.machine.hardware import Hardware
from study.paths import REPORT
from study.pipeline.ledger import Ledger
from study.pipeline.locks import locked
from study.pipeline.runner import Runner, StepError
from study.pipeline.status import status_lines
from study.pipeline.step import Step
from study.pipeline.steps import steps_of
from study.report.report import write_report
from study.results.diverged import diverged_runs, left_out_lines
from study.results.paired import Paired
from study.tracking import described
from study.tracking.importer import mirror
from study.tracking.store import store_uri
from tests.sealing import write_ending
from tests.study.synthetic import table_of
from train.run.directory import RunDirectory

IDENTITY = "ab" * 8  # of the run that diverges
CODE = """
import hashlib, json, pathlib, sys
study, name, *outputs = sys.argv[1:]
study = pathlib.Path(study)
(study / "order.txt").open("a").write(name + chr(10))
for output in outputs:
    (study / output).parent.mkdir(parents=True, exist_ok=True)
    values = {"of": name}
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    seal = hashlib.sha256(canonical.encode()).hexdigest()
    (study / output).write_text(json.dumps(values | {"sha256": seal}))
"""


def step(name: str, kind: str, outputs: list[str], count: int | None = None, **fields) -> Step:
    """Leaves its outputs, or the first of them and fails."""
    count = len(outputs) if count is None else count
    code = CODE + ("" if count == len(outputs) else "sys.exit(2)")
    command = ("{python}", "-I", "-S", "-c", code, "{study}", name, *outputs[:count])
    return Step(name, kind, command, tuple(outputs), **fields)


def checkpoint(run: str, number: int) -> str:
    return f"{run}/checkpoints/step{number:08d}/checkpoint.json"


def chain(*, count: int = 1, identity: str = IDENTITY) -> list[Step]:
    """Two runs, of which `hot` ends after its checkpoint of step 2; a branch of its step 4; what is
    exported and measured of each checkpoint; and a table of what there is.
    """
    steps = [
        step(
            "train-hot",
            "train",
            [checkpoint("hot", number) for number in (2, 4)],
            count,
            run="hot",
            settings=identity,
            resumes=True,
        ),
        step("train-well", "train", [checkpoint("well", 4)], run="well", settings="cd" * 8),
        step(
            "train-branch",
            "train",
            [checkpoint("branch", 6)],
            run="branch",
            after=("train-hot",),
            reads=(checkpoint("hot", 4),),
        ),
    ]
    for run, number in (("hot", 2), ("hot", 4), ("well", 4), ("branch", 6)):
        name = f"{run}-{number}"
        read = (checkpoint(run, number),)
        made_by = (f"train-{run}",)
        steps.append(step(f"export-{name}", "test", [f"{name}.x"], after=made_by, reads=read))
        steps.append(step(f"measure-{name}", "test", [f"{name}.y"], after=(f"export-{name}",)))
    before = tuple(each.name for each in steps)
    return [*steps, step("collect", "collect", ["table"], after=before, tolerant=True)]


def run_all(directory: Path, steps: list[Step]) -> Runner:
    with locked(directory) as lock_fd:
        runner = Runner(directory, steps, Hardware(2), lock_fd)
        runner.run()
    return runner


def order(directory: Path) -> list[str]:
    return (directory / "order.txt").read_text().split()


LEFT_OUT = {"train-branch", "export-hot-4", "measure-hot-4", "export-branch-6", "measure-branch-6"}
MADE = {"train-hot", "train-well", "export-hot-2", "measure-hot-2", "export-well-4"}
MADE |= {"measure-well-4", "collect"}


@pytest.fixture
def hot(tmp_path) -> Path:
    """A study whose run `hot` says that it diverged at step 3."""
    directory = RunDirectory(tmp_path / "study" / "hot")
    directory.path.mkdir(parents=True)
    words = "hot diverged at step 3: not finite: loss nan; the last good checkpoint is step 2"
    write_ending(directory, "diverged", 3, fingerprint=IDENTITY, reason=words)
    return tmp_path / "study"


def test_a_diverged_run_stops_nothing_else_and_is_not_trained_again(hot, capsys):
    runner = run_all(hot, chain())
    assert set(order(hot)) == MADE
    assert order(hot)[-1] == "collect", "of what there is"
    assert runner.left_out == dict.fromkeys(LEFT_OUT, "hot diverged at step 3")
    assert "hot diverged at step 3: not finite: loss nan\n" in capsys.readouterr().err

    # resumed, nothing is open; status says why the rest is not there
    assert run_all(hot, chain()).complete == MADE
    assert len(order(hot)) == len(MADE)
    lines = list(status_lines(Ledger(hot, chain())))
    assert lines[0] == "train      2/3  1 left out: hot diverged at step 3"
    assert lines[1] == "test       4/8  4 left out: hot diverged at step 3"
    assert lines[3].startswith("hot diverged at step 3: not finite: loss nan; that is a result")
    assert lines[4] == f"7/12 steps complete in {hot}"

    # another configuration is another run
    steps = chain(count=2, identity="ef" * 8)
    assert run_all(hot, steps).left_out == {}
    assert set(order(hot)) == MADE | LEFT_OUT
    assert order(hot).count("collect") == 2, "of more than before"


def test_a_checkpoint_before_the_divergence_that_is_removed_is_missing(hot):
    run_all(hot, chain())
    (hot / checkpoint("hot", 2)).unlink()
    ledger = Ledger(hot, chain())
    reason = ledger.reason(ledger.steps["train-hot"])
    assert (
        reason
        == f"{hot / checkpoint('hot', 2)} is missing; copy it from where the study was"
        + (" made, or run")
    )


def test_a_training_that_failed_otherwise_is_a_failure_and_tried_again(hot):
    """All that does not depend on it is done; the table waits."""
    write_ending(RunDirectory(hot / "hot"), "failed", 3, fingerprint=IDENTITY)
    for count in (1, 2):
        with pytest.raises(StepError, match="train-hot failed"):
            run_all(hot, chain())
        assert order(hot).count("train-hot") == count
    done = {"train-hot", "train-well", "export-well-4", "measure-well-4"}
    assert set(order(hot)) == done


@pytest.fixture
def diverged(study_dir, study, store):
    """The synthetic study, whose run at the largest peak diverged after its first checkpoint."""
    run = study.runs[-1]
    directory = RunDirectory(study_dir / run.name)
    first, *others = run.save_steps
    for step in others:
        for path in (directory.checkpoints, directory.hf):
            for place in path.glob(f"*step{step:08d}"):
                for file in place.rglob("*.json"):
                    file.unlink()
    words = f"{run.name} diverged at step {first + 3}: not finite: loss nan; lower the rate"
    write_ending(directory, "diverged", first + 3, fingerprint=fingerprint(run), reason=words)
    return study_dir


def test_claims_choices_report_and_mirror_are_of_the_other_runs(diverged, study):
    run = study.runs[-1]
    words = f"{run.name} diverged at step {run.save_steps[0] + 3}: not finite: loss nan"
    rows = table_of(diverged, study)
    assert [row["step"] for row in rows if row["run"] == run.name] == [run.save_steps[0]]

    # every claim that the others can test is tested, and the choice is among them
    others = study.model_copy(update={"runs": study.runs[:-1]})
    paired = Paired(diverged)
    expected = claims_table(
        judge_all(others, [row for row in rows if row["run"] != run.name], paired)
    )
    lines = claims_table(judge_all(study, rows, paired))
    assert [line.cells for line in lines] == [line.cells for line in expected]
    ranking = next(iter(answers(Evidence(study, rows, paired), None))).ranking
    assert len(ranking) == len(study.runs) - 1
    assert left_out_lines(diverged, study) == [f"left out: {words}"]

    # the page and MLflow say so
    write_report(diverged, study)
    assert f"{words}." in (diverged / REPORT).read_text()
    mirror(diverged, study, store_uri(diverged.parent))
    directory = RunDirectory(diverged / run.name)
    assert described.status_of(directory, run) == "FAILED"
    assert described.run_tags(directory, run, "parent")["quantdyn.diverged"] == words
    assert described.has_ended(directory, run)


def test_a_branch_of_a_checkpoint_that_never_came_is_left_out_too(tmp_path):
    study = resolve("tiny", "smoke")
    branch = next(run for run in study.trained if run.branch_from)
    parent, origin = study.parent_of(branch), branch.branch_from
    assert origin
    directory = RunDirectory(tmp_path / parent.name)
    directory.path.mkdir()
    for step, others in ((origin.step, [branch.name]), (parent.total_steps, [])):
        reason = f"{parent.name} diverged at step {step}: a spike; lower it"
        identity = fingerprint(parent)
        write_ending(directory, "diverged", step, fingerprint=identity, reason=reason)
        words = diverged_runs(tmp_path, study)
        assert [*words] == [run.name for run in study.trained if run.name in (parent.name, *others)]
        for name in others:
            assert words[name] == f"{name} cannot start, since {reason.removesuffix('; lower it')}"


def test_the_steps_of_a_study_that_diverged_are_those_of_the_ledger(diverged, study):
    ledger = Ledger(diverged, steps_of(study))
    run = study.runs[-1]
    left_out = ledger.steps_left_out()
    assert all(run.name in name for name in left_out)
    first = f"step{run.save_steps[0]:08d}"
    assert f"export-{run.name}-{first}" not in left_out
    assert f"export-{run.name}-step{run.save_steps[1]:08d}" in left_out
    assert diverged_runs(diverged, study).keys() == {run.name}
    collect = ledger.steps["collect"]
    assert not any(name in ledger.lost for name in ledger.reads(collect))
