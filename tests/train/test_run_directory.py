"""Commits: whole or not at all, and unchanged when read."""

import json

import pytest

from base.environment import environment
from base.errors import UserError
from base.files import committed_directory, record_files, verify_files, write_json
from train.run.metrics import MetricsWriter, read_metrics


def test_json_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "out"

    def fill(text, fail=False):
        with committed_directory(target) as aside:
            (aside / "file").write_text(text)
            if fail:
                raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fill("one", fail=True)
    assert list(tmp_path.iterdir()) == []
    fill("one")
    with pytest.raises(OSError, match="no space"):
        fill("two", fail=True)
    assert (target / "file").read_text() == "one"
    fill("two")
    assert (target / "file").read_text() == "two"
    assert list(tmp_path.iterdir()) == [target]


def test_leftovers_of_a_killed_writer_go_and_a_living_one_is_respected(tmp_path):
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "half").write_text("written by a process that was killed")
    with committed_directory(tmp_path / "out") as aside:
        assert list(aside.iterdir()) == []
        with (
            pytest.raises(UserError, match="another process is writing"),
            committed_directory(tmp_path / "out"),
        ):
            pytest.fail("two writers")
        (aside / "file").write_text("one")
    assert (tmp_path / "out" / "file").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: path.unlink(), "is missing; do this"),
        (lambda path: path.write_bytes(b"12"), "has 2 bytes instead of 3; do this"),
        (lambda path: path.write_bytes(b"124"), r"was changed after it was written .*; do this"),
    ],
)
def test_damage_is_named(tmp_path, damage, expected):
    (tmp_path / "below").mkdir()
    path = tmp_path / "below" / "file"
    path.write_bytes(b"123")
    records = record_files(tmp_path)
    assert list(records) == ["below/file"]
    verify_files(tmp_path, records, "do this")
    damage(path)
    with pytest.raises(UserError, match=expected):
        verify_files(tmp_path, records, "do this")


def test_metrics_survive_a_torn_line_and_overlapping_attempts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsWriter(path, attempt=1)
    first.append(1, 10, loss=3.0)
    first.append(2, 20, loss=2.0)
    first.close()
    with path.open("a") as file:
        file.write('{"step": 3, "tok')
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    second = MetricsWriter(path, attempt=2)
    second.append(2, 20, loss=2.5)
    second.append(2, 20, held_out_loss=4.0)
    second.close()
    rows = read_metrics(path)
    assert [(row["step"], row["attempt"], row["loss"]) for row in rows] == [
        (1, 1, 3.0),
        (2, 2, 2.5),
    ]
    assert rows[1]["held_out_loss"] == 4.0
    orphan = MetricsWriter(path, attempt=1)  # of a node that was given up and trains on
    orphan.append(2, 20, loss=2.0, learning_rate=1.0, skipped=1)
    orphan.append(3, 30, loss=1.0, learning_rate=1.0)
    third = MetricsWriter(path, attempt=3)
    third.append(2, 20, loss=2.25, learning_rate=1.0)
    orphan.append(2, 20, loss=2.0, learning_rate=1.0)
    rows = read_metrics(path)
    assert [(row["step"], row["attempt"], row["loss"]) for row in rows] == [
        (1, 1, 3.0),
        (2, 3, 2.25),
        (3, 1, 1.0),
    ]
    assert rows[1].keys() == {"step", "tokens", "attempt", "time", "loss", "learning_rate"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        MetricsWriter(path, attempt=3).append(3, 30, loss=float("nan"))


@pytest.mark.parametrize(
    "changed",
    [
        {"loss": "NaN"},
        {"loss": None},
        {"loss": True},
        {"loss": 10**400},
        {"tokens": float("nan")},
        {"tokens": 10**19},
        {"step": 1.5},
        {"attempt": "1"},
        {"time": float("inf")},
        {"time": None},
        "tokens",
        "time",
    ],
    ids=str,
)
def test_a_row_that_no_command_writes_is_named(tmp_path, changed):
    path = tmp_path / "metrics.jsonl"
    row = {"step": 1, "tokens": 10, "attempt": 1, "time": 1.5, "loss": float("nan")}
    path.write_text(json.dumps(row) + "\n")
    assert [each["step"] for each in read_metrics(path)] == [1]
    if isinstance(changed, str):
        other = {key: value for key, value in row.items() if key != changed}
    else:
        other = row | changed
    path.write_text(json.dumps(row) + "\n" + json.dumps(other) + "\n")
    with pytest.raises(UserError, match=rf"line 2 of {path} is not a row of metrics"):
        read_metrics(path)


def test_a_machine_without_git_records_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    record = environment()
    assert (record["commit"], record["uncommitted_changes"]) == (None, None)
    assert record["packages"]["torch"]
