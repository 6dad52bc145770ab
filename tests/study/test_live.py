"""The live view: results of a study at work in its report and in MLflow, beside the steps."""

import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from study.__main__ import app
from study.definition import save_study
from study.figures import figure as drawing
from study.machine.hardware import Hardware
from study.pipeline import runner as running
from study.pipeline.runner import Runner, locked
from study.step import Step
from study.tracking.importer import mirror
from tests.study.running import command, noting, python_step
from tests.study.synthetic import PICTURE
from tests.study.tracking.stores import Database

WAITING = """
import pathlib, sys, time
study = pathlib.Path(sys.argv[1])
while not ((study / "view").exists() and len((study / "view").read_text().split()) >= {times}):
    time.sleep(0.01)
(study / "waited").write_text("")
"""
FAILING = """
import pathlib, sys
(pathlib.Path(sys.argv[1]) / "view").open("a").write("once\\n")
print("error: the store is away; start it")
sys.exit(2)
"""
LASTING = """
import os, pathlib, sys, time
aside = pathlib.Path(sys.argv[1]) / "aside"
aside.write_text(f"{os.getpid()}")
aside.rename(aside.with_name("view"))
time.sleep(1800)
"""
COLLECTING = """
import pathlib, sys
study = pathlib.Path(sys.argv[1])
assert not pathlib.Path("/proc", (study / "view").read_text()).exists()
(study / "table").write_text("")
"""


def run(directory: Path, steps: list[Step], refresh: str) -> None:
    with locked(directory) as lock_fd:
        runner = Runner(directory, steps, Hardware(1), lock_fd, refresh=command(refresh))
        runner.progress.interval_seconds = 0.02
        runner.run()


def test_a_refresh_that_fails_is_said_once_and_the_study_ends_well(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(running, "EVERY_SECONDS", 0.0)
    run(tmp_path, [python_step("waits", WAITING.format(times=3), ("waited",))], FAILING)
    lines = [line for line in capsys.readouterr().err.splitlines() if "MLflow" in line]
    assert lines == [
        f"report and MLflow stay as they were, log {tmp_path}/logs/refresh.log:"
        " error: the store is away; start it"
    ]


def test_a_refresh_at_work_ends_before_the_table_is_collected(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "EVERY_SECONDS", 0.0)
    steps = [
        python_step("waits", WAITING.format(times=1), ("waited",)),
        Step("collect", "collect", command(COLLECTING), ("table",), after=("waits",)),
    ]
    run(tmp_path, steps, LASTING)
    assert (tmp_path / "table").exists()


def test_no_refresh_begins_before_its_time(tmp_path):
    run(tmp_path, [python_step("quick", noting("quick"))], FAILING)
    assert not (tmp_path / "view").exists()


@pytest.fixture
def refresh(monkeypatch, store):
    """`refresh(directory)`: what the command says; no picture is drawn."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(drawing, "pictures_of", lambda _: {"png": PICTURE, "svg": b"", "pdf": b""})

    def called(directory: Path) -> str:
        words = ["refresh", directory.name, "--root", str(directory.parent)]
        return str(CliRunner().invoke(app, words, catch_exceptions=False).output)

    return called


def test_results_are_added_as_they_come_and_no_run_is_made_anew(
    study_dir, study, refresh, store, empty_store
):
    """At the end MLflow holds what one import of everything gives."""
    study = study.model_copy(update={"runs": study.runs[:2]})
    save_study(study_dir, study)
    first, second = study.runs
    whole = study_dir.with_name("whole")
    shutil.copytree(study_dir / second.name / "hf", whole)
    shutil.rmtree(study_dir / second.name / "hf")
    (late,) = (study_dir / first.name / "hf/step00000320").glob("curvature/**/result.json")
    content = late.read_bytes()
    late.unlink()
    database = Database(store, store)

    assert " results" in refresh(study_dir)
    table = pq.read_table(study_dir / "table.parquet").to_pylist()
    assert (study_dir / "report.html").stat().st_size > 10_000
    error, metric = "quant/gptq-b3-g32/relative_error", "relative error percent/gptq-b3-g32"
    has_error = {row["run"] for row in table if row[error] is not None}
    assert has_error == {first.name}  # the second run is trained alone
    points = {
        run: {at for name, at in values if name == metric}
        for run, values in database.points(study.name).items()
    }
    assert points[second.name] == set()
    # a later row waits for the measurement that is missing before it
    assert points[first.name] == {first.tokens_at(step) for step in (64, 192)}
    runs = database.runs(study.name)

    late.write_bytes(content)
    shutil.move(whole, study_dir / second.name / "hf")
    count, _, expected = refresh(study_dir).split()[-4:-1]
    assert count == expected
    assert database.runs(study.name) == runs
    other = f"sqlite:///{shutil.copy(empty_store, study_dir.parent / 'other.db')}"
    mirror(study_dir, study, other)
    assert database.points(study.name) == Database(other, other).points(study.name)


def test_before_the_first_checkpoint_there_is_no_report(study_dir, study, refresh, store):
    study = study.model_copy(update={"runs": study.runs[:1]})
    save_study(study_dir, study)
    for name in ("checkpoints", "hf"):
        shutil.rmtree(study_dir / study.runs[0].name / name)
    assert ": 0 of " in refresh(study_dir)
    assert not (study_dir / "report.html").exists()
    points = Database(store, store).points(study.name)
    assert any(name == "train/loss" for name, _ in points[study.runs[0].name])
