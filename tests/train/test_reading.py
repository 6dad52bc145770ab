"""Files of documents as people have them: what they hold, and the one line of a refusal."""

import codecs
import gzip
import io
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from base.errors import UserError
from train.data.documents import (
    DatasetPart,
    TextFile,
    check_given_once,
    parse_source,
    read_documents,
)
from train.data.prepare import prepare

TEXTS = ["one \u2028 two \u0085 three", " ", "caf\u00e9\x0b\x0c\x1c", "last"]
OBJECTS = [{"text": text, "meta": {"n": number}} for number, text in enumerate(TEXTS)]
LINES = [json.dumps(row, ensure_ascii=False) for row in OBJECTS]
PLAIN = "\n".join(LINES).encode()
ENDS = "one\r\ntwo\rthree\n\x85"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n"


def write(directory: Path, name: str, content: bytes) -> Path:
    path = directory / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", PLAIN),
        ("crlf.jsonl", b"\r\n".join(PLAIN.split(b"\n")) + b"\r\n"),
        ("blank.jsonl", b"\n \t\r\n" + PLAIN.replace(b"\n", b"\n\n\n") + b"\n\n"),
        ("mark.jsonl", codecs.BOM_UTF8 + PLAIN),
        ("joined.jsonl", b"\n".join(codecs.BOM_UTF8 + line for line in PLAIN.split(b"\n"))),
        ("a.ndjson", PLAIN),
        ("A.JSONL", PLAIN),
        ("A.NDJSON.GZ", gzip.compress(PLAIN)),
        ("a.ndjson.zst", zstandard.compress(PLAIN)),
        ("c4-train.00000-of-01024.json.gz", gzip.compress(PLAIN)),
        ("lines.json", codecs.BOM_UTF8 + b"\n" + PLAIN),
        ("array.json", json.dumps(OBJECTS).encode()),
        ("array.json.zst", zstandard.compress(json.dumps(OBJECTS).encode())),
        ("pretty.json", codecs.BOM_UTF8 + json.dumps(OBJECTS, indent=2).encode()),
        ("nan.jsonl", PLAIN.replace(b'"n": 1', b'"n": NaN').replace(b'"n": 2', b'"n": -Infinity')),
    ],
)
def test_lines_and_arrays_hold_the_documents_written_to_them(tmp_path, name, content):
    assert [*read_documents(write(tmp_path, name, content))] == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("one.json", b'{"text": "a"}', ["a"]),
        ("one.json", b'{\n  "text": "a"\n}\n', ["a"]),
        ("none.json", b" \n", []),
        ("none.json", b"[]", []),
        ("ends.txt", ENDS.encode(), [ENDS]),
        ("ends", ENDS.encode(), [ENDS]),
        ("ends.txt.zst", zstandard.compress(ENDS.encode()), [ENDS]),
        ("mark.txt", codecs.BOM_UTF8 + b"a\r\nb", ["a\r\nb"]),
        ("mark.txt.gz", gzip.compress(codecs.BOM_UTF8 + b"a"), ["a"]),
        ("code.txt", b'{\n  "text": "a"\n}\n', ['{\n  "text": "a"\n}\n']),
        ("set.txt", b"{a}\n{b}\n", ["{a}\n{b}\n"]),
    ],
)
def test_other_files_are_read_as_what_they_are(tmp_path, name, content, documents):
    assert [*read_documents(write(tmp_path, name, content))] == documents


def zst_of_window(log: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=log, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(PLAIN) + compressor.flush()


LONG = b"\n".join(json.dumps({"text": "x" * 90}).encode() for _ in range(400))
BROKEN = LONG[:30_000] + b"\xff" + LONG[30_001:]


def table(**columns: object) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), stream)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n{"te', ":3 is not JSON (Unterminated string"),
        ("a.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}", ":1 is not JSON (a number has"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, ":1 is not JSON (it is nested too deeply"),
        ("a.json", b"[" * 100_000, "a.json is not JSON (it is nested too deeply"),
        ("a.jsonl", b'{"text": "a"}\r{"text": "b"}', ":1 is not JSON (Extra data"),
        ("a.jsonl", b'["text"]', ":1 is not a JSON object with a 'text'"),
        ("a.json", b'[{"text": "a"}, 5]', ", element 2 is not a JSON object with a 'text'"),
        ("a.json", b'{\n"text": "a"\n}\n{\n"text": "b"\n}', "a.json is not JSON (Extra data"),
        ("a.json", b'[{"text": "a"}, {"content": "b"}]', ", element 2 has no 'text' but content"),
        ("a.json", b'"text"', "a.json is not a JSON object with a 'text'"),
        ("a.jsonl", b'{"text": NaN}', ":1: 'text' is not a string of valid Unicode"),
        ("a.jsonl", b'{"id": "7", "content": "a text"}', "with --key, such as --key content"),
        ("a.jsonl", b'{"a b": "text"}', "such as --key 'a b'"),
        ("a.jsonl", b'{"id": 7}', "has no 'text' but id; name what holds the text with --key"),
        ("a.jsonl", b"{}", ":1 has no 'text'; name what holds"),
        ("a.parquet", table(id=[b"7"], body=["a text"]), "but id, body; name what holds the text"),
        ("a.parquet", table(id=["7"], body=["a text"]), "such as --key body"),
        ("a.PARQUET", table(text=["a", None]), ", row 2: 'text' is not a string"),
        ("a.jsonl", BROKEN, "is not UTF-8 (invalid start byte at byte 30000)"),
        ("a.jsonl", codecs.BOM_UTF8 + BROKEN, "is not UTF-8 (invalid start byte at byte 30003)"),
        ("a.json", b"[\n" + BROKEN, "is not UTF-8 (invalid start byte at byte 30002)"),
        ("a.txt", codecs.BOM_UTF8 + b"caf\xe9 au", "at byte 6)"),
        ("a.txt.gz", gzip.compress(b"caf\xe9 au"), "at byte 3 of the decompressed text)"),
        (
            "a.txt",
            PLAIN,
            "holds lines of JSON and would be one document; let its name end in .jsonl",
        ),
        ("part-00000", LINES[0].encode(), "holds lines of JSON"),
        ("a.txt", POINTER, "a.txt is a Git LFS pointer"),
        ("a.jsonl.gz", POINTER, "a.jsonl.gz is a Git LFS pointer"),
        ("a.txt.gz", gzip.compress(b"abc" * 10_000)[:-20], "a.txt.gz is damaged"),
        ("a.txt.zst", zstandard.compress(b"abc" * 10_000)[:-9], "a.txt.zst is damaged"),
        ("a.jsonl.zst", PLAIN, "a.jsonl.zst is damaged"),
        ("a.parquet", table(text=["a"])[:-20], "a.parquet is damaged"),
        ("a.parquet.gz", gzip.compress(table(text=["a"])), "is compressed twice"),
        ("a.jsonl", b'{"text": "\\ud800"}', ":1: 'text' is not a string of valid Unicode"),
        ("a.jsonl.zst", zst_of_window(31), "needs a window of 2 GB to be decompressed"),
        ("a.jsonl.zst", zst_of_window(28), "needs a window of 256 MB to be decompressed"),
        ("a.csv", b"text\na\n", "a.csv is a table; write it as .parquet or .jsonl"),
        ("a.jsonl.xz", b"", "is neither .gz nor .zst; compress it as one of them"),
        ("a.tar.gz", b"", "is an archive; unpack it"),
        ("a.bin", b"ab", "is tokens, not text; give PREFIX"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_holds_no_document_is_refused_in_one_line(tmp_path, name, content, words):
    with pytest.raises(UserError) as refusal:
        [*read_documents(write(tmp_path, name, content))]
    line = str(refusal.value)
    assert words in line
    assert "\n" not in line


def dataset_texts(directory: Path) -> list[str]:
    (part,) = parse_source(f"dataset:{directory}")
    assert isinstance(part, DatasetPart)
    return [*part.texts()]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"te', "1/1 is damaged (JSON parse error"),
        ("a.jsonl", b'{"text": "a\xff"}', "1/1 is damaged ('utf-8' codec can't decode byte 0xff"),
        ("a.jsonl.gz", gzip.compress(LONG)[:-20], "cannot be read (Compressed file ended"),
        ("a.jsonl", b"", "cannot be read (a file is empty"),
        ("a.jsonl", b'{"id": "7", "content": "a text"}', "such as --key content"),
        ("a.jsonl", b'{"text": 5}', "row 1: 'text' is not a string"),
        ("a.parquet", table(n=[1], body=["a"]), "row 1 has no 'text' but n, body; "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_dataset_cannot_read_is_refused_in_one_line(tmp_path, name, content, words):
    write(tmp_path, name, content)
    with pytest.raises(UserError) as refusal:
        dataset_texts(tmp_path)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", codecs.BOM_UTF8 + PLAIN.replace(b"\n", b"\n\n") + b"\n"),
        ("a.parquet", table(text=TEXTS)),
    ],
)
def test_a_dataset_holds_the_documents_of_its_files(tmp_path, name, content):
    path = write(tmp_path, name, content)
    assert dataset_texts(tmp_path) == [*read_documents(path)] == TEXTS


def test_one_file_under_two_names_is_given_twice(tmp_path, monkeypatch):
    path = write(tmp_path, "a.jsonl", PLAIN)
    (tmp_path / "link.jsonl").symlink_to(path)
    (tmp_path / "hard.jsonl").hardlink_to(path)
    (tmp_path / "copy.jsonl").write_bytes(PLAIN)
    monkeypatch.chdir(tmp_path)
    for again in ("a.jsonl", "./a.jsonl", str(path), "link.jsonl", "hard.jsonl"):
        with pytest.raises(UserError, match="give every source once"):
            check_given_once([TextFile(path=Path("a.jsonl")), TextFile(path=Path(again))])
    check_given_once([TextFile(path=Path("a.jsonl")), TextFile(path=Path("copy.jsonl"))])
    parts = [
        *parse_source(f"dataset:{tmp_path}"),
        *parse_source(f"dataset:{tmp_path}/../{tmp_path.name}"),
    ]
    with pytest.raises(UserError, match="are one file; give every source once"):
        check_given_once(parts)
    with pytest.raises(UserError, match="are one file; give every source once"):
        check_given_once([TextFile(path=path), *parts[:1]])


def test_token_files_under_two_names_are_given_twice(tmp_path, tokenizer_dir):
    prepare([write(tmp_path, "a.jsonl", PLAIN)], tokenizer_dir, tmp_path / "tokens")
    for suffix in ("bin", "idx", "json"):
        (tmp_path / f"link.{suffix}").symlink_to(tmp_path / f"tokens.{suffix}")
    with pytest.raises(UserError, match=r"link and .*tokens are one file"):
        prepare([tmp_path / "tokens", tmp_path / "link"], tokenizer_dir, tmp_path / "out")
