"""Shares of a text part its documents, equal ones together, whatever order and source."""

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from base.errors import UserError
from tests.runs import make_run
from train.data.corpus import open_corpus
from train.data.manifest import PLACES, Share, parse_share, place_of
from train.data.prepare import Selection, prepare
from train.run.directory import RunDirectory
from train.run_data import open_data

CUTS = (0, 100_000, 250_000, PLACES)
SHARES = [Share(first=first, stop=stop) for first, stop in pairwise(CUTS)]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """400 documents of which every tenth is there three times."""
    generator = random.Random(5)
    once = [f"{number}: " + "".join(generator.choices("abcdefgh ", k=200)) for number in range(400)]
    return [*once, *once[::10], *once[::10]]


@pytest.fixture(scope="module")
def source(tmp_path_factory, texts) -> Path:
    path = tmp_path_factory.mktemp("share") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def documents(prefix: Path, tokenizer: Tokenizer) -> list[str]:
    corpus = open_corpus(prefix, verify_hashes=True)
    return [
        tokenizer.decode(corpus.document(i)[:-1].tolist()) for i in range(corpus.manifest.documents)
    ]


def split(source: Path, tokenizer_dir: Path, out: Path) -> list[list[str]]:
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    for number, share in enumerate(SHARES):
        manifest = prepare(
            [source], tokenizer_dir, out / str(number), selection=Selection(share=share)
        )
        assert manifest.share == share
    return [documents(out / str(number), tokenizer) for number in range(len(SHARES))]


def test_shares_part_a_text_and_its_token_file(tmp_path, texts, source, tokenizer_dir):
    parts = split(source, tokenizer_dir, tmp_path / "text")
    prepare([source], tokenizer_dir, tmp_path / "whole")
    again = split(tmp_path / "whole", tokenizer_dir, tmp_path / "tokens")
    for shares in (parts, again):
        assert sum(map(Counter, shares), Counter()) == Counter(texts)
        assert not any(
            set(share) & set(other) for i, share in enumerate(shares) for other in shares[:i]
        )
        assert [len(part) / len(texts) for part in shares] == pytest.approx(
            [0.1, 0.15, 0.75], abs=0.05
        )
    assert parts[0] == [text for text in texts if place_of(text.encode()) < 100_000]  # in order


def test_documents_are_cut_to_their_beginning(tmp_path, texts, source, tokenizer_dir):
    prepare([source], tokenizer_dir, tmp_path / "whole")
    for origin in (source, tmp_path / "whole"):
        prepare([origin], tokenizer_dir, tmp_path / "cut", selection=Selection(document_tokens=20))
        whole, cut = (
            open_corpus(tmp_path / "whole"),
            open_corpus(tmp_path / "cut", verify_hashes=True),
        )
        for index in (0, 7, len(texts) - 1):
            assert [*whole.document(index)[:19].tolist(), 0] == cut.document(index).tolist()


def test_too_little_is_refused_and_nothing_written(tmp_path, source, tokenizer_dir):
    with pytest.raises(UserError, match=r"would hold [\d,]+ tokens, 1,000,000 are needed"):
        prepare([source], tokenizer_dir, tmp_path / "out", at_least=1_000_000)
    assert not (tmp_path / "out.json").exists()


def test_a_token_file_of_another_tokenizer_is_refused(tmp_path, source, tokenizer_dir):
    prepare([source], tokenizer_dir, tmp_path / "whole")
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_text((tokenizer_dir / name).read_text() + "\n")
    with pytest.raises(UserError, match=r"was not made by this tokenizer"):
        prepare([tmp_path / "whole"], other, tmp_path / "out")


@pytest.mark.parametrize(
    ("held_out", "apart"), [(Share(first=0, stop=300_000), True), (None, False)]
)
def test_held_out_shares_of_the_text_may_be_measured_on(
    tmp_path, source, tokenizer_dir, held_out, apart
):
    trained_on = Selection(share=Share(first=300_000, stop=PLACES))
    measured_on = Selection(share=held_out) if held_out else Selection()
    prepare([source], tokenizer_dir, tmp_path / "train", selection=trained_on)
    prepare([source], tokenizer_dir, tmp_path / "held_out", selection=measured_on)
    inputs = {"train_prefix": tmp_path / "train", "held_out_prefix": tmp_path / "held_out"}
    run = make_run(tmp_path / "run", **inputs, tokenizer_dir=tokenizer_dir)
    if apart:
        open_data(run, RunDirectory(tmp_path / "run"), verify_hashes=True)
    else:
        with pytest.raises(UserError, match="is trained on"):
            open_data(run, RunDirectory(tmp_path / "run"), verify_hashes=True)


@pytest.mark.parametrize("text", ["5", "5-5", "7-3", "0-1000001", "-1-4", "a-b"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(UserError, match="is not a share FIRST-STOP"):
        parse_share(text)
