"""`prepare dataset:NAME:CONFIG:SPLIT:FILES`, against a prepare of those files themselves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from base.errors import UserError
from tests.runs import PROJECT, error_line, python, succeed
from train.data.corpus import open_corpus
from train.data.documents import TextFile, parse_source
from train.data.prepare import prepare

FILES = {
    f"train-{number}.jsonl": [f"text {number}.{line}" for line in range(number)]
    for number in range(1, 6)
} | {"test-1.jsonl": ["one", "two"]}


READER = """
import sys
from train.data.documents import parse_source
(part,) = parse_source(sys.argv[1], "body")
print([*part.texts()], "torch" in sys.modules)
import datasets
print(datasets.config.TORCH_AVAILABLE)
"""


@pytest.fixture
def dataset(tmp_path) -> Path:
    """Five files of split train of 1 to 5 documents, as `datasets` reads a directory, and another."""
    directory = tmp_path / "set"
    directory.mkdir()
    for name, texts in FILES.items():
        (directory / name).write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    return directory


@pytest.mark.parametrize(
    ("files", "names"),
    [("", [1, 2, 3, 4, 5]), ("2", [2]), ("2-4", [2, 3, 4]), ("5-5", [5]), ("1-5", [1, 2, 3, 4, 5])],
)
def test_the_files_hold_what_they_hold_alone(dataset, tokenizer_dir, tmp_path, files, names):
    paths = [dataset / f"train-{number}.jsonl" for number in names]
    alone = prepare(
        [TextFile(path=path, key="body") for path in paths], tokenizer_dir, tmp_path / "alone"
    )
    parts = parse_source(f"dataset:{dataset}::train:{files}", "body")
    chosen = prepare(parts, tokenizer_dir, tmp_path / "chosen")
    assert chosen.documents == sum(names)
    assert (chosen.sha256, chosen.idx) == (alone.sha256, alone.idx)
    assert list(chosen.sources) == [f"dataset:{dataset}::train:{number}/5" for number in names]


def test_the_command_reads_one_file(dataset, tokenizer_dir, tmp_path):
    options = ["--key", "body", "--tokenizer", str(tokenizer_dir), "--out", str(tmp_path / "out")]
    succeed(python("train", "prepare", f"dataset:{dataset}:::3", *options))
    manifest = open_corpus(tmp_path / "out").manifest
    assert manifest.documents == 3
    assert list(manifest.sources) == [f"dataset:{dataset}::train:3/5"]
    beyond = python("train", "prepare", f"dataset:{dataset}:::5-6", *options)
    assert "5-6: the dataset has files 1 to 5" in error_line(beyond)


def test_reading_imports_no_torch_and_takes_it_from_nobody(dataset):
    """Every worker would import it: seconds, and 200 MB."""
    program = [sys.executable, "-c", READER, f"dataset:{dataset}:::2"]
    done = subprocess.run(program, cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["['text 2.0', 'text 2.1'] False", "True"]


NOT_THERE, NO_RANGE = "the dataset has files 1 to 5", "is not a range of files; write such as 2"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((f"dataset:{{}}:::{files}", NOT_THERE) for files in ("0", "6", "3-2", "0-1")),
        *(
            (f"dataset:{{}}:::{files}", NO_RANGE)
            for files in ("a", "1-", "-1", "1,2", "1-2-3", " 1", "1\n", "\u0661", "1" * 10)
        ),
        ("dataset:{}::none", "correct the name, configuration or split"),
        *((text, "is not a dataset") for text in ("dataset:", "dataset::en", "dataset:a:b:c:1:2")),
    ],
)
def test_what_names_no_files_of_a_dataset_is_refused(dataset, text, words):
    with pytest.raises(UserError, match=words):
        parse_source(text.format(dataset))
