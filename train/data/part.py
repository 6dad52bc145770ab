"""One source of a prepare, tokenized: its chosen documents, and a record of their origin.

`train.data.prepare` makes a part of every source, in worker processes, and joins the parts.
"""

import functools
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from base.errors import UserError
from base.files import (
    FileRecord,
    committed_directory,
    hash_file,
    record_file,
    sha256_of,
    write_json,
)
from base.frozen import Frozen
from base.reading import read_model
from train.data.corpus import open_corpus
from train.data.documents import Source, TextFile, TokenDocuments
from train.data.manifest import SpecialTokens
from train.data.share import EVERYTHING, Share
from train.data.tokenizer import (
    TOKENIZER_JSON,
    load_tokenizer,
    special_tokens,
    vocabulary_size,
)

PART_JSON = "part.json"
DOCUMENTS_PER_CALL = 64
Document = NDArray[Any]


class Selection(Frozen):
    """The documents that are kept of a source, how much of each, and how they are read."""

    share: Share = EVERYTHING
    document_tokens: int | None = None  # at most, the end-of-text token included
    special_tokens: SpecialTokens = "split"  # those typed in the text

    def cut(self, ids: Any, eos_token_id: int, dtype: np.dtype[Any]) -> Document:
        """Return the kept tokens of a document, with the end-of-text token."""
        first_ids = ids if self.document_tokens is None else ids[: self.document_tokens - 1]
        return np.array([*first_ids, eos_token_id], dtype)


ALL = Selection()


class Origin(Frozen):
    """The source and settings of a part: if they change, the part is made again."""

    source: Source
    record: FileRecord | None  # of the source; the files of a dataset have none
    tokenizer_sha256: str
    eos_token_id: int
    chosen: Selection


class Part(Frozen):
    """part.json: one source, beside `bin`, its tokens, and `lengths` of its documents, int32."""

    origin: Origin
    bin: FileRecord
    documents: int
    tokens: int
    max_token_id: int
    typed_special_tokens: int  # of a token file none are known


class Vocabulary(NamedTuple):
    """A tokenizer and what every part needs to know about it."""

    tokenizer: Tokenizer
    eos_token_id: int
    sha256: str
    size: int  # the largest id and one
    special_tokens: re.Pattern[str]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type that tokens are written as."""
        return np.dtype(np.uint16 if self.size <= 1 << 16 else np.int32)


class Batch(NamedTuple):
    """Some documents, and how many special tokens are typed in their text."""

    documents: list[Document]
    typed_special_tokens: int = 0


@functools.cache
def vocabulary_of(directory: Path) -> Vocabulary:
    """Return the tokenizer of a directory; a worker loads it once for many sources."""
    tokenizer, eos_token_id = load_tokenizer(directory)
    return Vocabulary(
        tokenizer,
        eos_token_id,
        sha256=sha256_of(directory / TOKENIZER_JSON),
        size=vocabulary_size(tokenizer),
        special_tokens=special_tokens(tokenizer),
    )


def make_part(source: Source, tokenizer_dir: Path, directory: Path, selection: Selection) -> None:
    """Make the part of one source, unless a prepare that was killed has made it."""
    vocabulary = vocabulary_of(tokenizer_dir)
    origin = Origin(
        source=source,
        record=_record_of(source),
        tokenizer_sha256=vocabulary.sha256,
        eos_token_id=vocabulary.eos_token_id,
        chosen=selection,
    )
    try:
        if read_model(Part, directory / PART_JSON).origin == origin:
            return
    except (FileNotFoundError, UserError):
        pass

    with committed_directory(directory) as unfinished:
        part = _write_tokens(unfinished, origin, vocabulary)
        write_json(unfinished / PART_JSON, part.model_dump(mode="json"))


def _write_tokens(directory: Path, origin: Origin, vocabulary: Vocabulary) -> Part:
    """Write `bin` and `lengths` of a part, some documents at a time; return its record."""
    documents, tokens, max_token_id, typed = 0, 0, -1, 0
    reader = _known_tokens if isinstance(origin.source, TokenDocuments) else _tokenized
    with (directory / "bin").open("wb") as file, (directory / "lengths").open("wb") as lengths:
        for batch in reader(origin, vocabulary):
            joined = np.concatenate(batch.documents)
            file.write(joined.tobytes())
            lengths.write(np.array([*map(len, batch.documents)], np.int32).tobytes())

            documents += len(batch.documents)
            tokens += len(joined)
            max_token_id = max(max_token_id, int(joined.max()))
            typed += batch.typed_special_tokens
    return Part(
        origin=origin,
        bin=record_file(directory / "bin", "sha256"),
        documents=documents,
        tokens=tokens,
        max_token_id=max_token_id,
        typed_special_tokens=typed,
    )


def _record_of(source: Source) -> FileRecord | None:
    """Return size and hash of the file that a source is read from, if it is one."""
    if isinstance(source, TokenDocuments):
        return open_corpus(source.prefix).manifest.bin
    if isinstance(source, TextFile) and source.path.is_file():
        return hash_file(source.path, "sha256")
    return None


def token_bytes(document: Document) -> bytes:
    """Return the content of a document of a token file, for its place among all."""
    return document.astype("<i4").tobytes()


def _known_tokens(origin: Origin, vocabulary: Vocabulary) -> Iterator[Batch]:
    """Yield the chosen documents of a token file; UserError where another tokenizer made it."""
    assert isinstance(origin.source, TokenDocuments)
    selection, corpus = origin.chosen, open_corpus(origin.source.prefix, verify_hashes=True)
    if corpus.manifest.tokenizer_sha256 != vocabulary.sha256:
        raise UserError(
            f"{corpus.prefix} was not made by this tokenizer; give the directory that made it"
        )
    for index in range(corpus.manifest.documents):
        document = corpus.document(index)
        if selection.share.holds(token_bytes(document)):
            eos_token_id = corpus.manifest.eos_token_id
            yield Batch([selection.cut(document[:-1], eos_token_id, vocabulary.dtype)])


def _tokenized(origin: Origin, vocabulary: Vocabulary) -> Iterator[Batch]:
    """Yield the chosen documents of a text as tokens, some at a time.

    UserError for one with an end-of-text token inside, where that is to be ordinary text.
    """
    assert not isinstance(origin.source, TokenDocuments)
    selection, texts = origin.chosen, origin.source.texts()
    if selection.share != EVERYTHING:
        texts = (text for text in texts if selection.share.holds(text.encode()))
    splits, eos_token_id = selection.special_tokens == "split", vocabulary.eos_token_id
    vocabulary.tokenizer.encode_special_tokens = splits  # as what they are spelled with

    def document(ids: list[int]) -> Document:
        if splits and eos_token_id in ids:  # of an ordinary word of its vocabulary
            raise UserError(
                f"{origin.source.name} holds a text of which the tokenizer makes an end-of-text"
                " token, even as ordinary text; take it out, or give --parse-special-tokens"
            )
        return selection.cut(ids, eos_token_id, vocabulary.dtype)

    encode, pattern = vocabulary.tokenizer.encode_batch_fast, vocabulary.special_tokens
    while batch := list(islice(texts, DOCUMENTS_PER_CALL)):
        yield Batch(  # encodings are large: none is kept until the next ones
            [document(encoding.ids) for encoding in encode(batch, add_special_tokens=False)],
            sum(len(pattern.findall(text)) for text in batch),
        )
