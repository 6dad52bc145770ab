"""Text to token files: every source has its texts, workers and kills change no byte."""

import gzip
import io
import json
import os
import random
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import Tokenizer

from base.errors import UserError
from base.files import sha256_of
from tests.interpreter import interpreter
from tests.runs import environment, error_line, python, succeed
from tests.train.stalled import stalling
from tests.train.trajectories import flip_a_byte
from tests.waiting import wait_until
from train.data.corpus import open_corpus
from train.data.documents import TextFile
from train.data.prepare import prepare

TEXTS = [
    "one\r\ntwo",
    "",
    "caf\u00e9 \U0001f600 \x00 \u2028 end",
    *(f"def f{i}(x):\n    return x * {i}\n" for i in range(200)),
]
SUFFIXES = ("bin", "idx", "json")


def parquet(texts: Sequence[str | None]) -> bytes:
    stream = io.BytesIO()
    table = pyarrow.table({"n": list(range(len(texts))), "body": texts})
    pyarrow.parquet.write_table(table, stream, row_group_size=50)
    return stream.getvalue()


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"body": text}) + "\n" for text in texts).encode()


def zst(content: bytes) -> bytes:
    """Two frames one after the other, as parallel compressors write."""
    half = len(content) // 2
    return zstandard.compress(content[:half]) + zstandard.compress(content[half:])


FORMATS = {
    "a.jsonl": json_lines(TEXTS),
    "a.jsonl.gz": gzip.compress(json_lines(TEXTS)),
    "a.jsonl.zst": zst(json_lines(TEXTS)),
    "a.parquet": parquet(TEXTS),
}


def bodies(*paths: Path) -> list[TextFile]:
    """Files whose texts are under the key 'body'."""
    return [TextFile(path=path, key="body") for path in paths]


def test_every_format_holds_the_same_documents(tmp_path, tokenizer_dir):
    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    digests = set()
    for name, content in FORMATS.items():
        (tmp_path / name).write_bytes(content)
        manifest = prepare(bodies(tmp_path / name), tokenizer_dir, tmp_path / "out")
        digests.add(manifest.sha256)
        assert manifest.sources[str(tmp_path / name)].digest == (
            f"sha256:{sha256_of(tmp_path / name)}"
        )
    assert len(digests) == 1
    corpus = open_corpus(tmp_path / "out", verify_hashes=True)
    assert corpus.manifest.documents == len(TEXTS)
    assert [tokenizer.decode(corpus.document(i)[:-1].tolist()) for i in range(len(TEXTS))] == TEXTS


def test_workers_do_not_change_a_byte(tmp_path, tokenizer_dir):
    """Five sources, one of them empty: prepared at once, and by two workers."""
    sources = []
    for number, texts in enumerate((TEXTS[:50], TEXTS[50:51], [], TEXTS[51:130], TEXTS[130:])):
        sources.append(tmp_path / f"{number}.jsonl")
        sources[-1].write_bytes(json_lines(texts))
    prepare(bodies(*sources), tokenizer_dir, tmp_path / "whole")
    options = ["--key", "body", "--tokenizer", str(tokenizer_dir), "--workers", "2"]
    succeed(
        python("train", "prepare", *map(str, sources), *options, "--out", str(tmp_path / "two"))
    )
    for suffix in SUFFIXES:
        whole = (tmp_path / f"whole.{suffix}").read_bytes()
        assert (tmp_path / f"two.{suffix}").read_bytes() == whole
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_killed_prepare_resumes(tmp_path, tokenizer_dir):
    """Killed in the third source: two are not read again."""
    generator = random.Random(0)
    large = ["".join(generator.choices("abcdefgh \n", k=2_000)) for _ in range(60)]
    sources = []
    for number, texts in enumerate((TEXTS[:50], TEXTS[50:], large)):
        sources.append(tmp_path / f"{number}.jsonl")
        sources[-1].write_bytes(json_lines(texts))
    out = tmp_path / "out"
    options = ["--key", "body", "--tokenizer", str(tokenizer_dir), "--out", str(out)]
    arguments = [*map(str, sources), *options]
    command = [interpreter(), "-m", "train", "prepare", *arguments, "--workers", "2"]
    stalled = environment() | stalling(tmp_path / "never", source=sources[2])
    child = subprocess.Popen([*command[:2], "tests.train.stalled", *command[2:]], env=stalled)
    kept = tmp_path / ".out.parts"
    wait_until(
        lambda: (kept / "000000").exists() and (kept / "000001").exists(), "two sources kept", child
    )
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not (kept / "000002").exists()
    assert not out.with_suffix(".json").exists()

    absent = ["train", "prepare", *arguments, str(tmp_path / "none.jsonl")]
    while "another process" in (refused := python(*absent)).stderr:
        pass  # its workers end with it
    assert "none.jsonl does not exist" in error_line(refused)
    times = [(kept / f"00000{number}").stat().st_ctime_ns for number in range(3)]
    sources[1].write_bytes(json_lines(TEXTS[60:]))  # this one has to be read again
    assert "none.jsonl does not exist" in error_line(python(*absent))
    again = [(kept / f"00000{number}").stat().st_ctime_ns for number in range(3)]
    same = [before == after for before, after in zip(times, again, strict=True)]
    assert same == [True, False, True]
    manifest = prepare(bodies(*sources), tokenizer_dir, out)
    assert manifest == prepare(bodies(*sources), tokenizer_dir, tmp_path / "fresh")
    assert not kept.exists()


def emptied(path: Path) -> None:
    """As after a power loss: the name is on the disk, the content is not."""
    path.write_bytes(b"")


def with_a_token_more(path: Path) -> None:
    content = json.loads(path.read_text())
    content["max_token_id"] += 1
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("bin", flip_a_byte),
        ("lengths", flip_a_byte),
        ("lengths", emptied),
        ("lengths", Path.unlink),
        ("part.json", with_a_token_more),
    ],
)
def test_a_damaged_part_is_made_again(tmp_path, tokenizer_dir, name, damage):
    first, second = bodies(tmp_path / "first.jsonl", tmp_path / "second.jsonl")
    first.path.write_bytes(json_lines(TEXTS))
    second.path.write_bytes(b"{")
    with pytest.raises(UserError, match=r"second\.jsonl:1 is not JSON"):
        prepare([first, second], tokenizer_dir, tmp_path / "out")
    damage(tmp_path / ".out.parts/000000" / name)
    second.path.write_bytes(json_lines(TEXTS))
    manifest = prepare([first, second], tokenizer_dir, tmp_path / "out")
    assert manifest == prepare([first, second], tokenizer_dir, tmp_path / "fresh")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("bad.jsonl", b'{"text": "one"}\n{"txt": "two"}\n', "bad.jsonl:2 has no 'text' but txt;"),
        ("empty.jsonl", b"", "no document in 1 source"),
        ("none.txt", None, "none.txt does not exist"),
    ],
)
def test_a_source_that_is_refused_leaves_nothing(tmp_path, tokenizer_dir, name, content, expected):
    """The refusals of files are in `test_reading`."""
    source, out = tmp_path / name, tmp_path / "out" / "tokens"
    if content is not None:
        source.write_bytes(content)
    with pytest.raises(UserError) as refused:
        prepare([source], tokenizer_dir, out)
    assert expected in str(refused.value)
    assert list(out.parent.iterdir()) == []


def test_the_command_refuses_in_one_line(tmp_path, tokenizer_dir):
    out = ["--tokenizer", str(tokenizer_dir), "--out", str(tmp_path / "out" / "tokens")]
    for arguments, expected in (
        ([str(tmp_path)], "is a directory; give its files, "),
        (["x.txt", "--share", "3-2"], "--share 3-2 is not a share FIRST-STOP"),
    ):
        assert expected in error_line(python("train", "prepare", *arguments, *out))
    assert not list(tmp_path.glob("out/*"))
