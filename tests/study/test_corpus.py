"""The corpus: real text, the same twice, split by file, with a tokenizer that gives every text
back.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from base.errors import UserError
from base.files import sha256_of
from study.text.standard_library import HELD_OUT_CHARACTERS, build_corpus, head_of, is_held_out
from train.data.corpus import open_corpus
from train.data.prepare import prepare

PROJECT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """240 small modules made from real ones, beside what must be left out."""
    root = tmp_path_factory.mktemp("lib")
    library = Path(json.__file__).parent.parent
    modules = [path for path in sorted(library.glob("*.py")) if path.stat().st_size < 60_000][:120]
    for folder in ("", "package"):
        (root / folder).mkdir(exist_ok=True)
        for path in modules:
            (root / folder / path.name).write_bytes(path.read_bytes()[:6000].rpartition(b"\n")[0])
    for folder in ("test", "package/tests", "site-packages/thing", "__pycache__"):
        (root / folder).mkdir(parents=True)
        (root / folder / "left_out.py").write_text("secret = 1\n")
    (root / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9t\xe9'\n")
    return root


VOCAB_SIZE = 400


@pytest.fixture(scope="module")
def corpus(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "corpus"
    build_corpus(out, VOCAB_SIZE, root=source)
    return out


def documents(corpus: Path, split: str) -> dict[str, str]:
    lines = (corpus / f"{split}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["path"] for row in rows}) == len(rows)
    return {row["path"]: row["text"] for row in rows}


def test_splits_are_disjoint_complete_and_without_tests(source, corpus):
    train, held_out = documents(corpus, "train"), documents(corpus, "held_out")
    assert not train.keys() & held_out.keys()
    wanted = {
        str(path.relative_to(source)) for path in source.rglob("*.py") if path.name != "left_out.py"
    }
    empty = {name for name in wanted if not (source / name).read_bytes().strip()}
    assert train.keys() | held_out.keys() == wanted - empty
    assert 0.03 < len(held_out) / len(wanted) < 0.2


def test_training_text_is_whole_and_held_out_text_is_a_beginning(source, corpus):
    for name, text in documents(corpus, "train").items():
        if name != "latin.py":
            assert text == (source / name).read_text()
    for name, text in documents(corpus, "held_out").items():
        if name != "latin.py":
            whole = (source / name).read_text()
            assert whole.startswith(text)
            assert len(text) <= HELD_OUT_CHARACTERS
            assert text.endswith("\n") or text == whole


def test_files_are_read_in_their_own_encoding(corpus):
    everything = documents(corpus, "train") | documents(corpus, "held_out")
    assert "\u00e9t\u00e9" in everything["latin.py"]


def test_another_process_makes_the_same_bytes(source, corpus, tmp_path):
    out, root = str(tmp_path / "b"), str(source)
    code = (
        f"from study.text.standard_library import *; build_corpus(Path({out!r}),"
        f" {VOCAB_SIZE}, Path({root!r}))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "77", "RAYON_NUM_THREADS": "2"}
    subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, env=environment, check=True, capture_output=True
    )
    names = sorted(str(path.relative_to(corpus)) for path in corpus.rglob("*") if path.is_file())
    assert "corpus.json" in names
    for name in names:
        assert sha256_of(corpus / name) == sha256_of(tmp_path / "b" / name), name


def test_a_file_stays_in_its_split_when_others_come(source, corpus):
    for split in ("train", "held_out"):
        for name in documents(corpus, split):
            assert is_held_out(name) == (split == "held_out")


def test_the_tokenizer_gives_every_text_back_and_serves_transformers_and_prepare(corpus, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    assert len(tokenizer) == 400
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == 0
    for text in (
        "def f(x):\n    return x\n",
        "caf\u00e9 \U0001f600 \x00 \t\r\n",
        *documents(corpus, "held_out").values(),
    ):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    manifest = prepare([corpus / "held_out.jsonl"], corpus / "tokenizer", tmp_path / "held_out")
    texts = list(documents(corpus, "held_out").values())
    assert manifest.documents == len(texts)
    first = open_corpus(tmp_path / "held_out").document(0)
    assert first[-1] == 0
    assert tokenizer.decode(first[:-1]) == texts[0]


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "one.py").write_text("x = 1\n")
    with pytest.raises(UserError, match="holds 1 Python files"):
        build_corpus(tmp_path / "out", VOCAB_SIZE, root=tmp_path)
    assert not (tmp_path / "out").exists()


def test_head_of_cuts_at_line_ends():
    assert head_of("ab\ncd\nef\n", 7) == "ab\ncd\n"
    assert head_of("ab\ncd\n", 6) == "ab\ncd\n"
    assert head_of("abcdef", 3) == "abc"
