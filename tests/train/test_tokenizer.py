"""Tokenizers whose file truncates, pads, has holes or drops merges, and special tokens in a text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer
from typer.testing import CliRunner

from base.errors import UserError
from study.text.survey import survey_files
from train.__main__ import app
from train.data.corpus import open_corpus
from train.data.prepare import Selection, prepare
from train.data.tokenizer import load_tokenizer, special_tokens, vocabulary_size

END = "<|endoftext|>"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:a\nsize 1\n"
WORDS = "def words(x): return x  # and more of them than four"
TRUNCATION = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": END,
}


def added(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True} | flags


@pytest.fixture
def changed(tmp_path, tokenizer_dir):
    """`changed(change)`: a copy of the tokenizer after `change(content of tokenizer.json)`."""

    def make(change) -> Path:
        directory = tmp_path / "changed"
        directory.mkdir()
        content = json.loads((tokenizer_dir / "tokenizer.json").read_text())
        change(content)
        (directory / "tokenizer.json").write_text(json.dumps(content))
        config = (tokenizer_dir / "tokenizer_config.json").read_bytes()
        (directory / "tokenizer_config.json").write_bytes(config)
        return directory

    return make


def lines(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def tokens(prefix: Path) -> list[list[int]]:
    corpus = open_corpus(prefix, verify_hashes=True)
    return [corpus.document(index).tolist() for index in range(corpus.manifest.documents)]


@pytest.mark.parametrize("setting", [{"truncation": TRUNCATION}, {"padding": PADDING}])
def test_a_document_loses_and_gains_no_token(tmp_path, tokenizer_dir, changed, setting):
    source = lines(tmp_path / "a.jsonl", WORDS, "x")
    prepare([source], tokenizer_dir, tmp_path / "plain")
    directory = changed(lambda content: content.update(setting))
    prepare([source], directory, tmp_path / "out")
    assert tokens(tmp_path / "out") == tokens(tmp_path / "plain")
    assert len(tokens(tmp_path / "out")[0]) > 10

    # what a study counts before it starts, and what lm-eval asks transformers for
    sizes = [survey_files([source], "text", each, 320) for each in (tokenizer_dir, directory)]
    assert np.array_equal(sizes[0].tokens_D, sizes[1].tokens_D)
    assert (
        AutoTokenizer.from_pretrained(directory)(WORDS)["input_ids"]
        == (tokens(tmp_path / "out")[0][:-1])
    )


def test_a_special_token_typed_in_a_text_is_text(tmp_path, tokenizer_dir, changed):
    """The ids are those of the same tokenizer without special tokens."""
    directory = changed(lambda content: content["added_tokens"].append(added(320, "<|pad|>")))
    texts = [f"one{END}two <|pad|>{END}", "none", "<|pad|"]
    source = lines(tmp_path / "a.jsonl", *texts)
    manifest = prepare([source], directory, tmp_path / "out")
    content = json.loads((tokenizer_dir / "tokenizer.json").read_text())
    plain = Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
    assert tokens(tmp_path / "out") == [[*plain.encode(text).ids, 0] for text in texts]
    assert (manifest.special_tokens, manifest.typed_special_tokens) == ("split", 3)

    options = [str(source), "--tokenizer", str(directory), "--out", str(tmp_path / "out")]
    printed = CliRunner().invoke(app, ["prepare", *options]).stdout
    assert "special tokens typed in the text: 3, split as ordinary text" in printed
    printed = CliRunner().invoke(app, ["prepare", *options, "--parse-special-tokens"]).stdout
    assert "special tokens typed in the text: 3, read as such" in printed
    first, second = (plain.encode(text).ids for text in ("one", "two "))
    assert tokens(tmp_path / "out")[0] == [*first, 0, *second, 320, 0, 0]
    assert open_corpus(tmp_path / "out").manifest.special_tokens == "parse"


def test_token_files_keep_how_their_text_was_read(tmp_path, tokenizer_dir):
    source = lines(tmp_path / "a.jsonl", f"one{END}two")
    parsed = Selection(special_tokens="parse")
    prepare([source], tokenizer_dir, tmp_path / "parsed", selection=parsed)
    prepare([source], tokenizer_dir, tmp_path / "split")
    again = prepare([tmp_path / "parsed"], tokenizer_dir, tmp_path / "again")
    assert again.special_tokens == "parse"
    for sources, selection in (
        ([source, tmp_path / "parsed"], Selection()),
        ([tmp_path / "split", tmp_path / "parsed"], Selection()),
        ([tmp_path / "split"], parsed),
    ):
        with pytest.raises(UserError, match="give --parse-special-tokens for all of them or for"):
            prepare(sources, tokenizer_dir, tmp_path / "mixed", selection=selection)


def test_an_end_of_text_that_is_an_ordinary_word_is_refused(tmp_path):
    """A vocabulary of words holds it as one of them."""
    directory = tmp_path / "words"
    directory.mkdir()
    words = Tokenizer(WordLevel({"[unk]": 0, "a": 1, "END": 2}, unk_token="[unk]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "END"}')
    source = lines(tmp_path / "a.jsonl", "a a", "a END a")
    with pytest.raises(UserError, match=r"a\.jsonl holds a text of which the tokenizer makes"):
        prepare([source], directory, tmp_path / "out")
    parsed = Selection(special_tokens="parse")
    manifest = prepare([source], directory, tmp_path / "out", selection=parsed)
    assert tokens(tmp_path / "out") == [[1, 1, 2], [1, 2, 1, 2]]
    assert manifest.typed_special_tokens == 1


def test_an_end_of_text_that_is_not_marked_special_is_split_all_the_same(tmp_path, changed):
    directory = changed(lambda content: content["added_tokens"][0].update(special=False))
    source = lines(tmp_path / "a.jsonl", f"one{END}two")
    assert prepare([source], directory, tmp_path / "out").typed_special_tokens == 1
    assert 0 not in tokens(tmp_path / "out")[0][:-1]


@pytest.mark.parametrize(("largest", "itemsize"), [(600, 2), (65_535, 2), (65_536, 4), (70_000, 4)])
def test_the_largest_id_decides_the_type(tmp_path, changed, largest, itemsize):
    """321 tokens, one of which has a large id."""
    word = "\u0120zebra"
    directory = changed(lambda content: content["model"]["vocab"].update({word: largest}))
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"]["ignore_merges"] = True  # a word of the vocabulary is a token
    (directory / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(directory)[0].get_vocab_size() == 321
    assert vocabulary_size(load_tokenizer(directory)[0]) == largest + 1
    manifest = prepare([lines(tmp_path / "a.jsonl", "a zebra")], directory, tmp_path / "out")
    assert (manifest.vocab_size, manifest.max_token_id) == (largest + 1, largest)
    assert tokens(tmp_path / "out")[0][1:] == [largest, 0]
    assert manifest.bin.bytes == itemsize * manifest.tokens


def test_a_tokenizer_that_draws_its_tokens_is_refused(changed):
    directory = changed(lambda content: content["model"].update(dropout=0.1))
    with pytest.raises(UserError, match=r"has a dropout of 0\.1"):
        load_tokenizer(directory)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", POINTER, r"tokenizer\.json is a Git LFS pointer"),
        *(
            ("tokenizer_config.json", f'{{"eos_token": {eos}}}', "(names no eos_token|is damaged)")
            for eos in ('"\\ud800"', "5", "{}", '{"content": [1]}', "null", '"none"')
        ),
    ],
)
def test_what_is_no_tokenizer_is_refused(changed, file, content, words):
    directory = changed(lambda content: None)
    (directory / file).write_text(content)
    with pytest.raises(UserError, match=words):
        load_tokenizer(directory)


def test_the_longest_special_token_counts_once(changed):
    directory = changed(
        lambda content: content["added_tokens"].extend([added(320, "<|a|>"), added(321, "<|a|>b")])
    )
    pattern = special_tokens(load_tokenizer(directory)[0])
    assert pattern.findall("<|a|>b<|a|><|a") == ["<|a|>b", "<|a|>"]
