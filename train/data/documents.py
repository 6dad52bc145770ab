"""Sources of documents: files of text, of JSON and of parquet, parts of datasets, token files.

What is refused of a file is refused here. `train.data.prepare` tokenizes the documents.
"""

import codecs
import functools
import io
import json
import re
import shlex
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet
import zstandard

from base.errors import UserError
from base.files import check_fetched, file_identity
from base.frozen import Frozen
from base.libraries.private_names import replace

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
ARROW_WINDOW_BYTES = 128 << 20  # that Arrow decompresses zstd with, at most
PARQUET_ROWS = 1024
SHOWN_NAMES = 12  # of the fields that a refusal lists

# Each would else be one document of what is not its text.
UNREAD = (
    dict.fromkeys((".tar", ".tgz", ".zip"), "an archive; unpack it and give its files")
    | dict.fromkeys((".bz2", ".xz", ".lz4"), "neither .gz nor .zst; compress it as one of them")
    | dict.fromkeys((".csv", ".tsv", ".arrow"), "a table; write it as .parquet or .jsonl")
    | dict.fromkeys((".bin", ".idx", ".npy"), "tokens, not text; give PREFIX of a token file")
)


def read_documents(path: Path, key: str = "text") -> Iterator[str]:
    """Yield the documents of one file; UserError names the line or row that holds none.

    A .jsonl or .ndjson holds one object with a text under `key` per line, a .json such lines, one
    array of such objects or one object, a .parquet a column `key` of texts. Any other file is one
    document. All but .parquet may be compressed, as .gz or .zst. Only a newline ends a line, blank
    lines are skipped, and byte-order marks are no part of a text. Fields other than `key` are not
    judged: they may hold NaN.
    """
    if path.is_dir():
        raise UserError(f"{path} is a directory; give its files, {path}/*, or dataset:{path}")
    if path.exists() and not path.is_file():  # a pipe cannot be hashed and read
        raise UserError(f"{path} is not a regular file; write its content to one and give that")
    reader = _reader_of(path)
    try:
        check_fetched(path)
        yield from reader(path, key)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give text, .jsonl or .parquet files") from None
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the file system's
            raise
        raise _damage(path, str(error)) from None


def _reader_of(path: Path) -> Callable[[Path, str], Iterator[str]]:
    """Return the reader of a file by the end of its name, in capitals or not."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if _is_compressed(path):
        suffixes.pop()
    kind = suffixes[-1] if suffixes else ""
    if kind in UNREAD:
        raise UserError(f"{path} is {UNREAD[kind]}")
    return {
        ".jsonl": _json_lines_texts,
        ".ndjson": _json_lines_texts,
        ".json": _json_texts,
        ".parquet": _parquet,
    }.get(kind, _plain_text)


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSIONS


@contextmanager
def _decompressed(path: Path) -> Iterator[BinaryIO]:
    with path.open("rb") as file:
        if not _is_compressed(path):
            yield file
            return
        # Arrow's streams continue after the end of a frame and raise where a file breaks off.
        compression = COMPRESSIONS[path.suffix.lower()]
        with pyarrow.input_stream(file, compression=compression) as stream:
            yield io.BufferedReader(stream)


def _damage(path: Path, reason: str) -> UserError:
    """Return the error for a file that Arrow could not read."""
    if "too much memory" in reason:  # zstd's, for a window above its limit
        return UserError(
            f"{path} needs a window of {_window(path)} to be decompressed, above"
            f" {ARROW_WINDOW_BYTES >> 20} MB; decompress it with 'zstd -d --long=31'"
        )
    return UserError(f"{path} is damaged ({reason.partition(chr(10))[0]}); fetch or write it again")


def _window(path: Path) -> str:
    """Return the window that the first frame of a .zst asks for, in words."""
    with path.open("rb") as file:
        try:
            size = zstandard.get_frame_parameters(file.read(18)).window_size
        except zstandard.ZstdError:  # a frame that is skipped
            size = 0
    if size <= ARROW_WINDOW_BYTES:  # a later frame asks for more
        return "an unknown size"
    return f"{size >> 30} GB" if size >= 1 << 30 else f"{size >> 20} MB"


def _decoded(path: Path, content: bytes, start: int = 0) -> str:
    """Return bytes that begin at byte `start` of a file as text; UserError for no UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        position = f"byte {start + error.start}"
        position += " of the decompressed text" if _is_compressed(path) else ""
        raise UserError(
            f"{path} is not UTF-8 ({error.reason} at {position}); convert it first"
        ) from None


def _plain_text(path: Path, _key: str) -> Iterator[str]:
    with _decompressed(path) as stream:
        content = stream.read()
    text = content.removeprefix(codecs.BOM_UTF8)
    if _holds_json_lines(text):
        raise UserError(
            f"{path} holds lines of JSON and would be one document; let its name end in .jsonl"
        )
    yield _decoded(path, text, len(content) - len(text))


def _holds_json_lines(content: bytes) -> bool:
    """Return whether the first two lines of a text, or its only one, are objects of JSON."""
    lines = [*islice(filter(bytes.strip, io.BytesIO(content)), 2)]
    return bool(lines) and all(map(_is_object, lines))


def _is_object(line: bytes) -> bool:
    try:
        return line.lstrip().startswith(b"{") and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield location and value of every line of JSON; UserError for a line that is none.

    Only a newline ends a line. Blank lines are skipped, and a byte-order mark before a line.
    """
    for number, start, line in _lines(path):
        location = f"{path}:{number}"
        yield location, _parsed(location, _decoded(path, line, start))


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, first byte and content of every line that is not blank."""
    start = 0
    with _decompressed(path) as stream:
        for number, line in enumerate(stream, start=1):
            content = line.removeprefix(codecs.BOM_UTF8)
            if content.strip():
                yield number, start + len(line) - len(content), content
            start += len(line)


def _parsed(location: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg}: character {error.pos}"
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError:  # of int()
        reason = "a number has too many digits"
    raise UserError(f"{location} is not JSON ({reason}); correct it")


def _json_lines_texts(path: Path, key: str) -> Iterator[str]:
    for location, value in json_lines(path):
        yield text_of(value, location, key)


def _json_texts(path: Path, key: str) -> Iterator[str]:
    """Yield the texts of lines, or else of the objects of one array, or of one object."""
    first = next(_lines(path), None)
    # A first line that is an object by itself means lines; else the file is one value.
    if first is None or _is_object(first[2]):
        yield from _json_lines_texts(path, key)
        return
    with _decompressed(path) as stream:
        content = stream.read()
    text = content.removeprefix(codecs.BOM_UTF8)
    value = _parsed(str(path), _decoded(path, text, len(content) - len(text)))
    if not isinstance(value, list):
        yield text_of(value, str(path), key)
        return
    for number, element in enumerate(value, start=1):
        yield text_of(element, f"{path}, element {number}", key)


def _parquet(path: Path, key: str) -> Iterator[str]:
    if _is_compressed(path):
        raise UserError(f"{path} is compressed twice; decompress it to a .parquet")
    with pyarrow.parquet.ParquetFile(path) as table:
        columns = table.schema_arrow.names
        if key not in columns:
            fields: dict[str, Any] = dict.fromkeys(columns)
            # A first row shows which column holds the longest text, the likely key.
            for rows in islice(table.iter_batches(batch_size=1), 1):
                fields |= rows.to_pylist()[0]
            raise missing_key(str(path), key, fields)
        number = 0
        for rows in table.iter_batches(batch_size=PARQUET_ROWS, columns=[key]):
            for value in rows.column(0):
                number += 1
                yield _checked(_arrow_value(value), f"{path}, row {number}", key)


def _arrow_value(value: Any) -> Any:
    """Return a value of a table; None for a string that is not UTF-8."""
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return None


def text_of(value: Any, location: str, key: str) -> str:
    """Return the text under the key of an object; UserError for anything else."""
    if not isinstance(value, dict):
        raise UserError(f"{location} is not a JSON object with a '{key}'; correct it")
    if key not in value:
        raise missing_key(location, key, value)
    return _checked(value[key], location, key)


def missing_key(location: str, key: str, fields: Mapping[str, Any]) -> UserError:
    """Return the error for an object or a table without the key; it names the longest text."""
    texts = {name: len(text) for name, text in fields.items() if isinstance(text, str)}
    likely = max(texts, key=lambda name: texts[name], default=None)
    names = ", ".join([*islice(fields, SHOWN_NAMES)]) + (
        ", ..." if len(fields) > SHOWN_NAMES else ""
    )
    way = f", such as --key {shlex.quote(likely)}" if likely else ""
    others = f" but {names:.300}" if names else ""
    return UserError(
        f"{location} has no '{key}'{others}; name what holds the text with --key{way:.100}"
    )


def _checked(text: Any, location: str, key: str) -> str:
    try:
        if isinstance(text, str):
            text.encode()
            return text
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can spell
        pass
    raise UserError(
        f"{location}: '{key}' is not a string of valid Unicode; correct it or choose another --key"
    )


DATASET = "dataset:"  # begins the name of a source that is not a file


class TextFile(Frozen):
    """A file of documents; see `read_documents`."""

    path: Path
    key: str = "text"

    @property
    def name(self) -> str:
        """Return the name in the manifest."""
        return str(self.path)

    @property
    def identity(self) -> Hashable:
        """Return what two names of one file have in common."""
        return file_identity(self.path)

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

    @property
    def identity(self) -> Hashable:
        """Return what two names of one token file have in common."""
        return file_identity(Path(f"{self.prefix}.bin"))


class DatasetPart(Frozen):
    """One file of a split of a dataset, by the dataset's own order of files."""

    dataset: str
    config: str  # the default one by its name, too
    split: str
    index: int
    parts: int
    file: str  # that the part is read from, see `_split`
    key: str = "text"

    @property
    def name(self) -> str:
        """Return the name in the manifest."""
        number = f"{self.index + 1}/{self.parts}"
        return f"{DATASET}{self.dataset}:{self.config}:{self.split}:{number}"

    @property
    def identity(self) -> Hashable:
        """Return what two names of one file have in common."""
        return file_identity(Path(self.file))

    def texts(self) -> Iterator[str]:
        """Yield the documents, in order.

        UserError for a row without text, a damaged file, or a dataset of other files by now.
        """
        stream, files = _split(self.dataset, self.config, self.split)
        if files[self.index : self.index + 1] != [self.file]:  # a worker looks for them anew
            raise UserError(f"{self.name} is no longer {self.file}; prepare it again")
        with _without_torch():
            part = stream.shard(num_shards=self.parts, index=self.index)
        with _one_line(f"{self.name} is damaged", "correct the file or fetch it again"):
            for number, row in enumerate(part, start=1):
                yield text_of(row, f"{self.name}, row {number}", self.key)


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


def check_given_once(sources: Sequence[Source]) -> None:
    """Raise UserError for a source that is given twice, by whatever path or link."""
    names: dict[Hashable, str] = {}
    for source in sources:
        first = names.get(source.identity)
        if first is not None:
            again = "is given twice" if first == source.name else f"and {first} are one file"
            raise UserError(f"{source.name} {again}; give every source once")
        names[source.identity] = source.name


@functools.cache
def _split(dataset: str, config: str | None, split: str) -> tuple[Any, list[str]]:
    """Return the stream of a split, and what each of its parts is read from.

    That is a path or, on the hub, a URL with the commit.
    """
    from datasets import load_dataset_builder  # a second to import, and nobody else needs it

    way = f"correct the name, configuration or split of {DATASET}NAME:CONFIG:SPLIT, or the files"
    with _one_line(f"dataset {dataset} cannot be read", way), _without_torch():
        builder = load_dataset_builder(dataset, config)
        stream = builder.as_streaming_dataset(split=split)
        files = list((builder.config.data_files or {}).get(split, ()))
    if len(files) != stream.num_shards:
        # It is read from the cache of `datasets`, or as a whole: a directory is named by its hash.
        files = [f"{builder.cache_dir}/{split}/{index}" for index in range(stream.num_shards)]
    return stream, files


@contextmanager
def _one_line(what: str, way: str) -> Iterator[None]:
    """Turn the errors of `datasets`, and of what it reads with, into a UserError."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except UserError:
        raise
    except StopIteration:  # of a schema that is read off the first row
        raise UserError(f"{what} (a file is empty); {way}") from None
    except (DatasetsError, ValueError, EOFError, OSError, RuntimeError, zlib.error) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{what} ({reason:.200}); {way}") from None


@contextmanager
def _without_torch() -> Iterator[None]:
    """Let `datasets` make a stream that keeps its epoch in an integer, not in a tensor.

    To import torch for that takes every worker 2.6 s and 200 MB.
    """
    from datasets import config

    available = replace(config, "TORCH_AVAILABLE", False)
    try:
        yield
    finally:
        replace(config, "TORCH_AVAILABLE", available)


def _dataset_parts(text: str, key: str) -> Iterator[DatasetPart]:
    dataset, *fields = text.removeprefix(DATASET).split(":")
    if not dataset or len(fields) > 3:
        raise UserError(f"{text} is not a dataset; write {DATASET}NAME[:CONFIG[:SPLIT[:FILES]]]")
    config, split, numbers = (*fields, *[""] * (3 - len(fields)))
    split = split or "train"
    stream, files = _split(dataset, config or None, split)
    for number in _file_numbers(text, numbers, len(files)):
        yield DatasetPart(
            dataset=dataset,
            config=stream.config_name,
            split=split,
            index=number - 1,
            parts=len(files),
            file=files[number - 1],
            key=key,
        )


def _file_numbers(text: str, numbers: str, parts: int) -> range:
    """Return the numbers, from 1, of the files that `numbers` names: '2', '1-8', '' for all."""
    if not numbers:
        return range(1, parts + 1)
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", numbers, re.ASCII)
    if not match:
        raise UserError(f"{text}: '{numbers}' is not a range of files; write such as 2 or 1-8")
    first, last = int(match[1]), int(match[2] or match[1])
    if not 1 <= first <= last <= parts:
        raise UserError(f"{text}: the dataset has files 1 to {parts}; give some of them")
    return range(first, last + 1)
