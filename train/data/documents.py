"""Sources of documents: files of text, files of datasets, and token files.

`train.data.reading` reads the files, `train.data.part` tokenizes them. Next: `train.data.prepare`.
"""

import functools
import re
import zlib
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.files import file_identity
from base.frozen import Frozen
from base.libraries.private_names import replace
from train.data.reading import read_documents, text_of

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

    @property
    def identity(self) -> Hashable:
        """Return what two names of one part have in common."""
        directory = Path(self.dataset)
        dataset = file_identity(directory) if directory.is_dir() else self.dataset
        return dataset, self.config, self.split, self.index

    def texts(self) -> Iterator[str]:
        """Yield the documents, in order; UserError for a row without text, or a damaged file."""
        stream = _stream(self.dataset, self.config, self.split)
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
def _stream(dataset: str, config: str | None, split: str) -> Any:
    from datasets import load_dataset  # a second to import, and nobody else needs it

    way = f"correct the name, configuration or split of {DATASET}NAME:CONFIG:SPLIT, or the files"
    with _one_line(f"dataset {dataset} cannot be read", way), _without_torch():
        return load_dataset(dataset, config, split=split, streaming=True)


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
