"""Damaged files of a submission: one line that names the file, and what can be derived is."""

import json
from pathlib import Path

import pytest

from base.errors import UserError
from slurm import cluster
from slurm.status.overview import look
from slurm.submission.record import (
    append_line,
    excluded_nodes,
    existing_submission,
    read_lines,
    record_end,
    record_start,
    starts_of,
)
from slurm.submission.survey import remember_complete, remembered
from tests.slurm.studies import make, submitted, watched_study

TEXT = ["corpus", "prepare-train"]


@pytest.fixture
def study_dir(tmp_path, monkeypatch) -> Path:
    """A submitted study with two complete steps, without SLURM."""
    monkeypatch.setattr(cluster, "states", lambda ids: {})
    directory, study = tmp_path / "small", watched_study()
    submission = submitted(directory, study)
    make(directory, study, TEXT)
    remember_complete(directory, set(TEXT))
    job = submission.element_ids["train", 0]
    record_start(directory, ("train", 0), job, 2, 5)
    record_end(directory, ("train", 0), job, "asked")
    return directory


@pytest.mark.parametrize("content", ["", "[", '["corpus"', "{}", "[1]", "\x00", '["gone"]'])
def test_the_memory_of_what_is_complete_is_derived_again(study_dir, content):
    before = {name for name, word in look(study_dir).situations.items() if word == "made"}
    assert before == set(TEXT)
    (study_dir / "slurm/complete.json").write_text(content)
    after = {name for name, word in look(study_dir).situations.items() if word == "made"}
    assert after == before
    remember_complete(study_dir, after)
    assert remembered(study_dir) == before


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            lambda line: line | {"event": "callimg"},
            "line 1: 'event': 'callimg' is unknown; did you mean calling?",
        ),
        (lambda line: {key: line[key] for key in line if key != "array"}, "line 1: key"),
        (lambda line: line | {"indices": ["0"]}, "line 1: "),
        (lambda line: line | {"indices": [10**6]}, r"is of text/1000000, which the study has"),
        (lambda line: line | {"array": "nope"}, "is of nope/0, which the study has not"),
        (lambda line: {"event": "refused"}, "not every call of sbatch has one answer"),
    ],
)
def test_a_damaged_line_of_the_jobs_is_named(study_dir, damage, problem):
    path = study_dir / "slurm/jobs.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(damage(json.loads(lines[0]))), *lines[1:], ""]))
    with pytest.raises(UserError, match=rf"{path}.*({problem})"):
        existing_submission(study_dir)


def test_a_lost_line_of_the_jobs_is_noticed(study_dir):
    path = study_dir / "slurm/jobs.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for lost in range(len(lines) - 1):  # the last one may be that of a call that is not answered
        path.write_text("".join(lines[:lost] + lines[lost + 1 :]))
        with pytest.raises(UserError, match="not every call of sbatch has one answer"):
            existing_submission(study_dir)


def test_a_flipped_bit_of_a_start_is_named(study_dir):
    """The highest bit of any byte; of others a line may pass for one that was cut off."""
    (path,) = (study_dir / "slurm/starts").iterdir()
    valid = path.read_bytes()
    for offset in range(len(valid)):
        path.write_bytes(valid[:offset] + bytes([valid[offset] | 128]) + valid[offset + 1 :])
        with pytest.raises(UserError, match=str(path)):
            starts_of(study_dir, ("train", 0))
    path.write_bytes(valid)
    assert starts_of(study_dir, ("train", 0))[0]["position"] == 5


def test_a_start_whose_beginning_is_lost_is_named(study_dir):
    (path,) = (study_dir / "slurm/starts").iterdir()
    path.write_text(path.read_text().splitlines(keepends=True)[1])
    with pytest.raises(UserError, match=rf"{path} is damaged \(no line says how start 0 of"):
        starts_of(study_dir, ("train", 0))


def test_lines_that_were_cut_off_anywhere_are_left_out(tmp_path):
    path, content = tmp_path / "a.jsonl", {"a": 1, "b": [1, 2], "c": "x"}
    line = json.dumps(content)
    for stop in range(len(line)):
        path.write_text(line[:stop])
        append_line(path, content)
        assert read_lines(dict[str, object], path) == [content]


def test_damaged_exclusions_are_named(study_dir):
    path = study_dir / "slurm/excluded.json"
    path.write_text('{"node7": 1}')
    with pytest.raises(UserError, match=rf"{path}: 'node7': Input should be a valid string"):
        excluded_nodes(study_dir)
