"""The corpus: the source of packages, the same everywhere, split by file, with a tokenizer that
gives every text back.
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from base.errors import UserError
from base.files import sha256_of
from study.text.package_sources import (
    PASSAGE_CHARACTERS,
    SHARES,
    build_corpus,
    passage_of,
    read_package,
    split,
)
from study.text_kinds import PACKAGES
from tests.present import present
from train.data.corpus import open_corpus
from train.data.prepare import prepare

PROJECT = Path(__file__).resolve().parent.parent.parent
SMALL = PACKAGES[:2]
VOCAB_SIZE = 400


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "corpus"
    build_corpus(out, VOCAB_SIZE, SMALL)
    return out


def documents(corpus: Path, use: str) -> dict[str, str]:
    rows = [json.loads(line) for line in (corpus / f"{use}.jsonl").read_text().splitlines()]
    assert len({row["path"] for row in rows}) == len(rows)
    return {row["path"]: row["text"] for row in rows}


@pytest.fixture(scope="module")
def by_use(corpus):
    return {use: documents(corpus, use) for use in SHARES}


@pytest.fixture(scope="module")
def installed():
    """The files that a walk over the installed packages finds, without their tests."""
    files = {}
    for package in SMALL:
        root = Path(present(importlib.import_module(package.partition("==")[0]).__file__)).parent
        for path in root.rglob("*.py"):
            if "/tests/" not in str(path) and path.read_bytes().strip():
                files[path.relative_to(root.parent).as_posix()] = path.read_text("utf-8")
    return files


def test_every_file_has_one_use_and_the_share_that_is_said(by_use, installed):
    parts = [set(by_use[use]) for use in SHARES]
    assert sum(map(len, parts)) == len(set.union(*parts))
    unused = installed.keys() - set.union(*parts)
    assert set.union(*parts) <= installed.keys()
    assert len(unused) < 0.05 * len(installed)
    held_out = {path for path in installed if int(sha(installed[path])[:16], 16) % 10**6 < 150_000}
    assert unused < held_out
    assert set(by_use["held_out"]) == held_out - unused
    assert 0.02 < len(by_use["calibration"]) / len(installed) < 0.08


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_files_to_train_on_are_whole_and_held_out_are_passages_of_one_length(by_use, installed):
    for use in ("train", "calibration"):
        assert all(text == installed[path] for path, text in by_use[use].items())
    for path, text in by_use["held_out"].items():
        assert f"\n{text}" in installed[path]
        assert text.endswith("\n")
        assert 0.8 * PASSAGE_CHARACTERS < len(text) <= PASSAGE_CHARACTERS


def test_a_passage_is_whole_lines_from_the_middle():
    lines = [f"line {number}\n" for number in range(10, 90)]
    assert passage_of("".join(lines), 24) == "".join(lines[39:42])


def placed(use: str, body: str) -> str:
    """Return a text with this body whose hash is in the share of a use."""
    texts = (f"{body}# {number}\n" for number in count())
    return next(text for text in texts if SHARES[use].holds(text.encode()))


def test_a_held_out_passage_that_training_text_repeats_is_left_out():
    body, other = (
        "".join(f"{word} is a number, {i} of many\n" for i in range(100)) for word in "ab"
    )
    mixed = "".join(sorted((body + other).splitlines(keepends=True), key=lambda line: line[::-1]))
    texts = {
        "train": placed("train", body),
        "indented": placed("held_out", "".join(f"    {line}\n" for line in body.splitlines())),
        "other": placed("held_out", other),
        "short": placed("held_out", other[:500]),
        "calibration": placed("calibration", body),
    }
    assert set(split(texts)["held_out"]) == {"other"}
    assert set(split(texts | {"train": placed("train", mixed)})["held_out"]) == set()
    del texts["train"]
    assert set(split(texts)["held_out"]) == {"indented", "other"}


def test_the_demos_text_has_millions_of_tokens_and_many_held_out_documents():
    texts = {path: text for package in PACKAGES for path, text in read_package(package).items()}
    by_use = split(texts)
    assert sum(map(len, by_use["train"].values())) > 3 * 5_000_000  # a token has 2.9 characters
    assert len(by_use["held_out"]) > 120
    folders = {path.rpartition("/")[0] for path in by_use["held_out"]}
    assert len(folders) > 50


def test_another_process_makes_the_same_bytes(corpus, tmp_path):
    out = tmp_path / "b"
    environment = os.environ | {"PYTHONHASHSEED": "77", "RAYON_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "study", "corpus", str(out), str(VOCAB_SIZE), *SMALL]
    subprocess.run(command, cwd=PROJECT, env=environment, check=True, capture_output=True)
    names = sorted(str(path.relative_to(corpus)) for path in corpus.rglob("*") if path.is_file())
    assert "corpus.json" in names
    for name in names:
        assert sha256_of(corpus / name) == sha256_of(out / name), name


def test_the_tokenizer_gives_every_text_back_and_serves_transformers_and_prepare(
    corpus, by_use, tmp_path
):
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    assert len(tokenizer) == 400
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == 0
    for text in (
        "def f(x):\n    return x\n",
        "caf\u00e9 \U0001f600 \x00 \t\r\n",
        *by_use["held_out"].values(),
    ):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    manifest = prepare([corpus / "held_out.jsonl"], corpus / "tokenizer", tmp_path / "held_out")
    texts = list(by_use["held_out"].values())
    assert manifest.documents == len(texts)
    first = open_corpus(tmp_path / "held_out").document(0)
    assert first[-1] == 0
    assert tokenizer.decode(first[:-1]) == texts[0]


@pytest.fixture
def thing(tmp_path, monkeypatch) -> Path:
    """A package of two files, installed: thing 1.2."""
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "code.py").write_text("x = 1\n")
    information = tmp_path / "thing-1.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.2\n")
    (information / "RECORD").write_text("thing/code.py,,\nthing/tests/code.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "thing"


def test_a_package_of_another_version_or_with_another_content_is_refused(thing):
    content = hashlib.sha256(b"x = 1\n").digest()
    sha256 = hashlib.sha256(b"thing/code.py\0" + content).hexdigest()
    assert read_package(f"thing==1.2#sha256={sha256}") == {"thing/code.py": "x = 1\n"}
    install = "run 'python -m pip install --force-reinstall --no-deps {}'"
    for package, expected in (
        ("thing==1.3", "the text is of thing==1.3, here thing is 1.2; "),
        ("nothing==1.3", "the text is of nothing==1.3, here nothing is not installed; "),
    ):
        with pytest.raises(UserError) as caught:
            read_package(f"{package}#sha256={sha256}")
        assert str(caught.value).startswith(expected + install.format(package))
    (thing / "code.py").write_text("x = 2\n")
    with pytest.raises(UserError, match=r"the installed files of thing==1\.2 are not"):
        read_package(f"thing==1.2#sha256={sha256}")
