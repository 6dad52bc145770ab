"""`prepare --dataset --files`: single files of a dataset, against a prepare of those files themselves."""

import json
from pathlib import Path

import pytest

from tests.runs import error_line, python
from train.command import UserError
from train.corpus import open_corpus
from train.documents import dataset_parts
from train.prepare import prepare

FILES = {f"train-{number}.jsonl": [f"text {number}.{line}" for line in range(number)] for number in range(1, 6)}


@pytest.fixture
def dataset(tmp_path) -> Path:
    """Five files of 1 to 5 documents, as `datasets` reads a directory."""
    directory = tmp_path / "set"
    directory.mkdir()
    for name, texts in FILES.items():
        (directory / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return directory


@pytest.mark.parametrize(("files", "names"), [("2", [2]), ("2-4", [2, 3, 4]), ("5-5", [5]), ("1-5", [1, 2, 3, 4, 5])])
def test_the_files_hold_what_they_hold_alone(dataset, tokenizer_dir, tmp_path, files, names):
    paths = [dataset / f"train-{number}.jsonl" for number in names]
    alone = prepare(paths, tokenizer_dir, tmp_path / "alone")
    parts = dataset_parts(str(dataset), None, "train", "text", files)
    chosen = prepare(parts, tokenizer_dir, tmp_path / "chosen")
    assert chosen.documents == sum(names)
    assert (chosen.sha256, chosen.idx) == (alone.sha256, alone.idx)
    assert list(chosen.sources) == [f"dataset:{dataset}::train:{number}/5" for number in names]


def test_the_command_reads_one_file(dataset, tokenizer_dir, tmp_path):
    command = ["train", "prepare", "--dataset", str(dataset), "--tokenizer", str(tokenizer_dir)]
    done = python(*command, "--files", "3", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert open_corpus(tmp_path / "out").manifest.documents == 3
    beyond = python(*command, "--files", "5-6", "--out", str(tmp_path / "none"))
    assert "--files 5-6: the dataset has files 1 to 5" in error_line(beyond)
    assert not list(tmp_path.glob("none*"))


@pytest.mark.parametrize("files", ["0", "6", "3-2", "0-1"])
def test_files_that_are_not_there_are_refused(dataset, files):
    with pytest.raises(UserError, match="the dataset has files 1 to 5"):
        dataset_parts(str(dataset), None, "train", "text", files)


@pytest.mark.parametrize("files", ["", "a", "1-", "-1", "1,2", "1-2-3", " 1", "1\n", "\u0661", "1" * 10])
def test_what_is_no_range_is_refused(dataset, files):
    with pytest.raises(UserError, match="is no range; give a number such as 2"):
        dataset_parts(str(dataset), None, "train", "text", files)


def test_files_belong_to_a_dataset(tmp_path):
    done = python("train", "prepare", "x.txt", "--files", "1", "--tokenizer", "t", "--out", str(tmp_path / "out"))
    assert "--dataset-config, --split and --files belong to --dataset" in error_line(done)
