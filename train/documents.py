"""Where documents come from: text, JSON lines and parquet files, compressed or not, and datasets read as a stream."""

import functools
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from train.command import UserError
from train.frozen import Frozen

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
PARQUET_ROWS = 1024


class TextFile(Frozen):
    """A file of documents; see `read_documents`."""

    path: Path
    key: str = "text"

    @property
    def name(self) -> str:
        """The name that the manifest gives it."""
        return str(self.path)

    def texts(self) -> Iterator[str]:
        """Its documents, in order."""
        return read_documents(self.path, self.key)


class TokenDocuments(Frozen):
    """The documents of a token file that `train.prepare` made earlier; they are not tokenized again."""

    prefix: Path

    @property
    def name(self) -> str:
        """The name that the manifest gives it."""
        return str(self.prefix)


class DatasetPart(Frozen):
    """One of the files behind a split of a dataset, by the dataset's own order of files."""

    dataset: str
    config: str | None
    split: str
    index: int
    parts: int
    key: str = "text"

    @property
    def name(self) -> str:
        """The name that the manifest gives it."""
        return f"dataset:{self.dataset}:{self.config or ''}:{self.split}:{self.index + 1}/{self.parts}"

    def texts(self) -> Iterator[str]:
        """Its documents, in order; UserError for a row without text."""
        part = _stream(self.dataset, self.config, self.split).shard(num_shards=self.parts, index=self.index)
        for number, row in enumerate(part, start=1):
            yield _checked(row.get(self.key), f"{self.name}, row {number}", self.key)


@functools.cache
def _stream(dataset: str, config: str | None, split: str) -> Any:
    from datasets import load_dataset  # a second to import, and nobody else needs it

    try:
        return load_dataset(dataset, config, split=split, streaming=True)
    except (ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"dataset {dataset}: {reason}; correct --dataset, --dataset-config or --split") from None


def dataset_parts(
    dataset: str, config: str | None, split: str, key: str, files: str | None = None
) -> list[DatasetPart]:
    """A split of a dataset as the files it consists of, read as a stream.

    Args:
        dataset: on the hub, or a directory.
        config: of the dataset.
        split: of the dataset.
        key: column that holds the text.
        files: numbers of the wanted files in the dataset's own order, from 1, such as '2' or '1-8'; None: all.

    Raises:
        UserError: it cannot be opened, or has no such files.
    """
    parts = int(_stream(dataset, config, split).num_shards)
    return [
        DatasetPart(dataset=dataset, config=config, split=split, index=number - 1, parts=parts, key=key)
        for number in _numbers(files, parts)
    ]


def _numbers(files: str | None, parts: int) -> range:
    if files is None:
        return range(1, parts + 1)
    found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", files, re.ASCII)
    if not found:
        raise UserError(f"--files {files} is no range; give a number such as 2, or the first and the last as 1-8")
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last <= parts:
        raise UserError(f"--files {files}: the dataset has files 1 to {parts}; give some of them, the first one first")
    return range(first, last + 1)


def read_documents(source: Path, key: str = "text") -> Iterator[str]:
    """Documents of one file, which may end in .gz or .zst as well; UserError names the line or row that holds none.

    A .jsonl holds one object with a text under `key` per line, a .parquet a column `key` of texts; any other file is
    one document.
    """
    compressed = source.suffix in COMPRESSIONS
    kind = source.with_suffix("").suffix if compressed else source.suffix
    read = {".jsonl": _json_lines, ".parquet": _parquet}.get(kind, _whole)
    if source.is_dir():
        raise UserError(f"{source} is a directory; give its files, or read it as a dataset with --dataset")
    if source.exists() and not source.is_file():
        raise UserError(f"{source} is no regular file and cannot be read twice; write the text to a file first")
    try:
        with _opened(source, spooled=compressed and kind == ".parquet") as stream:
            yield from read(source, stream, key)
    except FileNotFoundError:
        raise UserError(f"{source} does not exist; give text, .jsonl or .parquet files") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 ({error.reason} at byte {error.start}); convert it first") from None
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{source} is damaged ({str(error).partition(chr(10))[0]}); fetch or write it again") from None


@contextmanager
def _opened(source: Path, spooled: bool) -> Iterator[BinaryIO]:
    """The decompressed bytes; `spooled` through a nameless file for a reader that jumps back and forth."""
    with source.open("rb") as file:
        if source.suffix not in COMPRESSIONS:
            yield file
            return
        with pyarrow.input_stream(file, compression=COMPRESSIONS[source.suffix]) as plain:
            # Arrow's streams go on behind the end of a frame and raise where a file breaks off.
            stream = io.BufferedReader(_Decompressed(plain, source))
            if not spooled:
                yield stream
                return
            with tempfile.TemporaryFile() as whole:
                shutil.copyfileobj(stream, whole)
                whole.seek(0)
                yield whole


class _Decompressed(io.RawIOBase):
    """An Arrow stream whose errors name the file."""

    def __init__(self, stream: Any, source: Path) -> None:
        self._stream, self._source = stream, source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            found = self._stream.read(len(buffer))
        except OSError as error:
            raise UserError(f"{self._source} is damaged ({error}); fetch or compress it again") from None
        buffer[: len(found)] = found
        return len(found)


def _checked(text: Any, where: str, key: str) -> str:
    try:
        if isinstance(text, str):
            text.encode()
            return text
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell
        pass
    raise UserError(f"{where}: '{key}' is no string of valid Unicode; correct it or choose another --key")


def _whole(_source: Path, stream: BinaryIO, _key: str) -> Iterator[str]:
    with io.TextIOWrapper(stream, encoding="utf-8", newline="") as text:  # line ends stay as they are
        yield text.read()


def _json_lines(source: Path, stream: BinaryIO, key: str) -> Iterator[str]:
    with io.TextIOWrapper(stream, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = json.loads(line)[key]
            except (json.JSONDecodeError, KeyError, TypeError):
                raise UserError(f"{source}:{number} is no JSON object with a '{key}'; correct the line") from None
            yield _checked(text, f"{source}:{number}", key)


def _parquet(source: Path, stream: BinaryIO, key: str) -> Iterator[str]:
    with pyarrow.parquet.ParquetFile(stream) as table:
        columns = table.schema_arrow.names
        if key not in columns:
            raise UserError(f"{source} has no column '{key}' but {', '.join(columns)}; choose one with --key")
        number = 0
        for rows in table.iter_batches(batch_size=PARQUET_ROWS, columns=[key]):
            for text in rows.column(0).to_pylist():
                number += 1
                yield _checked(text, f"{source}, row {number}", key)
