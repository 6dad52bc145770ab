"""`prepare dataset:NAME:CONFIG:SPLIT:FILES`, against a prepare of those files themselves."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from base.errors import UserError
from tests.runs import PROJECT, error_line, make_run, python, succeed
from train.data import documents
from train.data.corpus import open_corpus
from train.data.documents import DatasetPart, Source, TextFile, parse_source
from train.data.prepare import Selection, prepare
from train.run.directory import RunDirectory
from train.run_data import open_data

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
    assert list(chosen.sources) == [
        f"dataset:{dataset}:default:train:{number}/5" for number in names
    ]


def test_the_command_reads_one_file(dataset, tokenizer_dir, tmp_path):
    options = ["--key", "body", "--tokenizer", str(tokenizer_dir), "--out", str(tmp_path / "out")]
    succeed(python("train", "prepare", f"dataset:{dataset}:::3", *options))
    manifest = open_corpus(tmp_path / "out").manifest
    assert manifest.documents == 3
    assert list(manifest.sources) == [f"dataset:{dataset}:default:train:3/5"]
    beyond = python("train", "prepare", f"dataset:{dataset}:::5-6", *options)
    assert "5-6: the dataset has files 1 to 5" in error_line(beyond)


@pytest.fixture
def interrupted(tokenizer_dir, tmp_path):
    """A prepare that ends in its last source; returns when each kept part of others was made."""

    def run(parts: list[Source]) -> list[int]:
        with pytest.raises(UserError, match=r"none\.jsonl does not exist"):
            prepare(
                [*parts, TextFile(path=tmp_path / "none.jsonl")], tokenizer_dir, tmp_path / "out"
            )
        kept = [tmp_path / f".out.parts/{index:06d}" for index in range(len(parts))]
        return [part.stat().st_ctime_ns for part in kept]

    return run


@pytest.fixture
def on_the_hub(dataset, monkeypatch) -> Callable[[str], None]:
    """Let the dataset of this machine stand in for one on the hub, at a commit."""
    stream, paths = documents._split(str(dataset), None, "train")

    def put(commit: str) -> None:
        files = [f"hf://datasets/me/set@{commit}/{Path(path).name}" for path in paths]
        monkeypatch.setattr(documents, "_split", lambda *_: (stream, files))

    return put


def change_first_file(dataset: Path) -> None:
    """Another text, and the time of the one before."""
    path = dataset / "train-1.jsonl"
    before = path.stat()
    path.write_text('{"body": "another text"}\n')
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_changed_file_of_a_dataset_is_read_again(dataset, tokenizer_dir, tmp_path, interrupted):
    parts = parse_source(f"dataset:{dataset}:::1-2", "body")
    times = interrupted(parts)
    change_first_file(dataset)
    again = interrupted(parts)
    assert [before == after for before, after in zip(times, again, strict=True)] == [False, True]
    manifest = prepare(parts, tokenizer_dir, tmp_path / "out")
    assert manifest == prepare(parts, tokenizer_dir, tmp_path / "fresh")


def test_another_commit_of_a_dataset_is_read_again(
    dataset, tokenizer_dir, tmp_path, interrupted, on_the_hub
):
    on_the_hub("5ee7")
    earlier = parse_source("dataset:me/set:::1-2", "body")
    times = interrupted(earlier)
    assert interrupted(earlier) == times
    change_first_file(dataset)
    on_the_hub("c0de")
    parts, first = parse_source("dataset:me/set:::1-2", "body"), earlier[0]
    assert isinstance(first, DatasetPart)
    with pytest.raises(UserError, match=r"no longer hf://datasets/me/set@5ee7/train-1.jsonl; prep"):
        [*first.texts()]
    manifest = prepare(parts, tokenizer_dir, tmp_path / "out")
    assert manifest == prepare(parts, tokenizer_dir, tmp_path / "fresh")


def open_texts(train: str, held_out: str, tokenizer_dir: Path, directory: Path) -> None:
    """Open the data of a run that trains on a text and holds out beginnings of documents."""
    trained_on, measured_on = directory / "train", directory / "held_out"
    beginnings = Selection(document_tokens=5)
    prepare(parse_source(train, "body"), tokenizer_dir, trained_on)
    prepare(parse_source(held_out, "body"), tokenizer_dir, measured_on, selection=beginnings)
    run = make_run(
        directory / "run",
        train_prefix=trained_on,
        held_out_prefix=measured_on,
        tokenizer_dir=tokenizer_dir,
    )
    open_data(run, RunDirectory(directory / "run"), verify_hashes=True)


SEEN, UNSEEN = "held_out is trained on: ", "tokens, fewer than one sequence"  # the next check


@pytest.mark.parametrize(
    ("train", "held_out", "words"),
    [
        ("dataset:set", "dataset:set", SEEN),
        ("dataset:set", "dataset:./set", SEEN),
        ("dataset:link", "dataset:set:default", SEEN),
        ("dataset:set:::2-3", "set/train-3.jsonl", SEEN),
        ("set/train-3.jsonl", "dataset:set:::2-3", SEEN),
        ("dataset:set:::1-2", "dataset:./set:::3", UNSEEN),
        ("dataset:set", "dataset:set::test", UNSEEN),
    ],
)
def test_held_out_text_of_a_dataset_is_known_by_any_name(
    dataset, tokenizer_dir, tmp_path, monkeypatch, train, held_out, words
):
    """Its tokens have other hashes, as its documents were cut."""
    (tmp_path / "link").symlink_to(dataset)
    monkeypatch.chdir(tmp_path)
    documents._split.cache_clear()  # of the directories that had these names before
    with pytest.raises(UserError, match=words):
        open_texts(train, held_out, tokenizer_dir, tmp_path)


@pytest.mark.parametrize("held_out", ["dataset:me/set", "dataset:me/set:default:train:2"])
def test_held_out_text_on_the_hub_is_known_by_any_name(
    tokenizer_dir, tmp_path, on_the_hub, held_out
):
    on_the_hub("5ee7")
    with pytest.raises(UserError, match=SEEN):
        open_texts("dataset:me/set", held_out, tokenizer_dir, tmp_path)


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
