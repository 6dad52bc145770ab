"""The progress line of a study, from planted steps, logs and times."""

from pathlib import Path

import pytest

from study.pipeline import progress
from study.pipeline.ledger import Ledger
from study.pipeline.progress import StudyProgress
from study.step import Step


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def steps() -> list[Step]:
    """Four trainings of 40 s, eight quantizations of 5 s, a report of 20 s."""
    trainings = [
        Step(f"train-r{run}", "train", (), (), run=f"r{run}", expected_seconds=40)
        for run in range(4)
    ]
    quantizations = [
        Step(f"quantize-{each.run}-{spec}", "quantize", (), (), run=each.run, expected_seconds=5)
        for each in trainings
        for spec in ("b3", "b4")
    ]
    return [*trainings, *quantizations, Step("report", "report", (), (), expected_seconds=20)]


def on_two_cores(directory: Path) -> StudyProgress:
    return StudyProgress("tiny", steps(), lambda _: 0.5, Ledger(directory, steps()))


def log(directory: Path, name: str, *lines: str) -> Path:
    path = directory / f"{name}.log"
    path.write_text("".join(f"{line}\n" for line in ("$ python -m train run r0", *lines)))
    return path


def test_a_line_says_what_runs_of_how_many_and_how_long_still(tmp_path, clock, capsys):
    shown, every = on_two_cores(tmp_path), {step.name: step for step in steps()}
    first = log(tmp_path, "r0", "r0 24/64  ETA 30 s  loss 5.021  lr 0.012")
    shown.started([every["train-r0"]], first)
    shown.started([every["train-r1"]], log(tmp_path, "r1"))
    assert capsys.readouterr().err == "", "nothing in the first seconds"

    clock.now = 10.0
    shown.refresh()
    # (4 trainings of 40 s, 8 of 5 s and 20 s, less 2 x 10 s) on two cores: 100 s
    line = "0:10  0/13 steps, 2 min left: train 1-2 of 4 (r0 24/64, r1)"
    assert capsys.readouterr().err == f"{line}\n"

    clock.now = 50.0
    shown.finished([every["train-r0"]], 50.0)
    pair = [every["quantize-r0-b3"], every["quantize-r0-b4"]]
    shown.started(pair, log(tmp_path, "quantize", "losses 3/12  ETA 4 s"))
    shown.refresh()
    shown.refresh()
    # Trainings take 50 s by now. The one at work is at its end by that guess; a quarter of what it
    # took counts. (2 x 50 + 12.5 + 8 x 5 + 20) / 2 = 86 s.
    line = "0:50  1/13 steps, 1 min left: train 2 of 4 (r1), quantize 1-2 of 8 (r0)"
    assert capsys.readouterr().err == f"{line}\n", "two events of one second are one line"


def test_a_step_that_takes_longer_than_expected_has_time_left(tmp_path, clock, capsys):
    *before, report = steps()
    shown = on_two_cores(tmp_path)
    shown.closed(before)
    shown.started([report], log(tmp_path, "report", "figures 7/20  ETA 100 s"))
    clock.now = 130.0
    shown.refresh()
    assert capsys.readouterr().err == "2:10  12/13 steps, 40 s left: report 7/20\n"


def test_of_many_processes_two_are_named_and_a_failure_has_its_own_line(tmp_path, clock, capsys):
    shown, every = on_two_cores(tmp_path), steps()
    for step in every[:4]:
        shown.started([step], log(tmp_path, step.run))
    clock.now = 20.0
    shown.closed(every[:1], "step train-r0 failed: why")
    shown.refresh()
    assert capsys.readouterr().err.splitlines() == [
        "step train-r0 failed: why",
        "0:20  1/13 steps, 1 min left: train 2-4 of 4 (r1, r2, 1 more)",
    ]
