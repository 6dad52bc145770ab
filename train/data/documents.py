"""Sources of documents: files of text, JSON lines and parquet, files of datasets, and token files.

`train.data.part` tokenizes them. Next: `train.data.prepare`.
"""

import functools
import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from base.errors import UserError
from base.frozen import Frozen

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
PARQUET_ROWS = 1024
DATASET = "dataset:"  # begins the name of a source that is not a file


class TextFile(Frozen):
    """A file of documents; see `read_documents`."""

    path: Path
    key: str = "text"

    @property
    def name(self) -> str:
        """Return the name in the manifest."""
        return str(self.path)

    def texts(self) -> Iterator[str]:
        """Yield the documents, in order."""
        return read_documents(self.path, self.key)


class TokenDocuments(Frozen):
    """The documents of a token file that `train.data.prepare` made earlier, not tokenized again."""

    prefix: Path

    @property
    def name(self) -> str:
        """Return the name in the manifest."""
        return str(self.prefix)


class DatasetPart(Frozen):
    """One file of a split of a dataset, by the dataset's own order of files."""

    dataset: str
    config: str | None
    split: str
    index: int
    parts: int
    key: str = "text"

    @property
    def name(self) -> str:
        """Return the name in the manifest."""
        place = f"{self.dataset}:{self.config or ''}:{self.split}"
        return f"{DATASET}{place}:{self.index + 1}/{self.parts}"

    def texts(self) -> Iterator[str]:
        """Yield the documents, in order; UserError for a row without text."""
        stream = _stream(self.dataset, self.config, self.split)
        with _without_torch():
            part = stream.shard(num_shards=self.parts, index=self.index)
        for number, row in enumerate(part, start=1):
            yield _checked(row.get(self.key), f"{self.name}, row {number}", self.key)


Source = TextFile | DatasetPart | TokenDocuments


def parse_source(text: str, key: str = "text") -> list[Source]:
    """Return the sources that a word of the command line names; UserError for no such dataset.

    A word is a file, PREFIX of a token file, or dataset:NAME[:CONFIG[:SPLIT[:FILES]]].
    """
    if text.startswith(DATASET):
        return [*_dataset_parts(text, key)]
    path = Path(text)
    if not path.exists() and Path(f"{path}.json").is_file():
        return [TokenDocuments(prefix=path)]
    return [TextFile(path=path, key=key)]


@functools.cache
def _stream(dataset: str, config: str | None, split: str) -> Any:
    from datasets import load_dataset  # a second to import, and nobody else needs it

    try:
        with _without_torch():
            return load_dataset(dataset, config, split=split, streaming=True)
    except (ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"dataset {dataset}: {reason}; correct the name, configuration or split of"
            f" {DATASET}NAME:CONFIG:SPLIT"
        ) from None


@contextmanager
def _without_torch() -> Iterator[None]:
    """Let `datasets` make a stream that keeps its epoch in an integer, not in a tensor.

    To import torch for that takes every worker 2.6 s and 200 MB.
    """
    from datasets import config

    available, config.TORCH_AVAILABLE = config.TORCH_AVAILABLE, False
    try:
        yield
    finally:
        config.TORCH_AVAILABLE = available


def _dataset_parts(text: str, key: str) -> Iterator[DatasetPart]:
    dataset, *fields = text.removeprefix(DATASET).split(":")
    if not dataset or len(fields) > 3:
        raise UserError(f"{text} is not a dataset; write {DATASET}NAME[:CONFIG[:SPLIT[:FILES]]]")
    config, split, files = (*fields, *[""] * (3 - len(fields)))
    split = split or "train"
    parts = int(_stream(dataset, config or None, split).num_shards)
    for number in _file_numbers(text, files, parts):
        yield DatasetPart(
            dataset=dataset,
            config=config or None,
            split=split,
            index=number - 1,
            parts=parts,
            key=key,
        )


def _file_numbers(text: str, files: str, parts: int) -> range:
    """Return the numbers, from 1, of the files that `files` names: '2', '1-8', or '' for all."""
    if not files:
        return range(1, parts + 1)
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", files, re.ASCII)
    if not match:
        raise UserError(f"{text}: '{files}' is not a range of files; write such as 2 or 1-8")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= parts:
        raise UserError(f"{text}: the dataset has files 1 to {parts}; give some of them")
    return range(first, last + 1)


def read_documents(path: Path, key: str = "text") -> Iterator[str]:
    """Yield the documents of one file; UserError names the line or row that holds none.

    A .jsonl holds one object with a text under `key` per line, a .parquet a column `key` of texts.
    Any other file is one document. All but .parquet may be compressed, as .gz or .zst.
    """
    compressed = path.suffix in COMPRESSIONS
    kind = path.with_suffix("").suffix if compressed else path.suffix
    reader = {".jsonl": _json_lines, ".parquet": _parquet}.get(kind, _plain_text)
    if path.exists() and not path.is_file():  # a pipe cannot be hashed and read
        raise UserError(f"{path} is not a file; give files, or a directory as {DATASET}{path}")
    try:
        with _decompressed(path) as stream:
            yield from reader(path, stream, key)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give text, .jsonl or .parquet files") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it first"
        ) from None
    except (pyarrow.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the file system's
            raise
        raise UserError(
            f"{path} is damaged ({str(error).partition(chr(10))[0]}); fetch or write it again"
        ) from None


@contextmanager
def _decompressed(path: Path) -> Iterator[BinaryIO]:
    with path.open("rb") as file:
        if path.suffix not in COMPRESSIONS:
            yield file
            return
        # Arrow's streams continue after the end of a frame and raise where a file breaks off.
        with pyarrow.input_stream(file, compression=COMPRESSIONS[path.suffix]) as stream:
            yield stream


def _checked(text: Any, place: str, key: str) -> str:
    try:
        if isinstance(text, str):
            text.encode()
            return text
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell
        pass
    raise UserError(
        f"{place}: '{key}' is not a string of valid Unicode; correct it or choose another --key"
    )


def _plain_text(_path: Path, stream: BinaryIO, _key: str) -> Iterator[str]:
    # newline="": line ends stay as they are
    with io.TextIOWrapper(stream, encoding="utf-8", newline="") as text:
        yield text.read()


def _json_lines(path: Path, stream: BinaryIO, key: str) -> Iterator[str]:
    with io.TextIOWrapper(stream, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = json.loads(line)[key]
            except (json.JSONDecodeError, KeyError, TypeError):
                raise UserError(
                    f"{path}:{number} is not a JSON object with a '{key}'; correct the line"
                ) from None
            yield _checked(text, f"{path}:{number}", key)


def _parquet(path: Path, stream: BinaryIO, key: str) -> Iterator[str]:
    if path.suffix in COMPRESSIONS:
        raise UserError(f"{path} is compressed twice; decompress it to a .parquet")
    with pyarrow.parquet.ParquetFile(stream) as table:
        columns = table.schema_arrow.names
        if key not in columns:
            raise UserError(
                f"{path} has no column '{key}' but {', '.join(columns)}; choose one with --key"
            )
        number = 0
        for rows in table.iter_batches(batch_size=PARQUET_ROWS, columns=[key]):
            for text in rows.column(0).to_pylist():
                number += 1
                yield _checked(text, f"{path}, row {number}", key)
