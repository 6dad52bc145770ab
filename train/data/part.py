"""One source of a prepare, tokenized: its chosen documents, and a record of what made them.

`train.data.prepare` makes a part of every source, in worker processes, and joins the parts.
"""

import functools
import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from tokenizers import Tokenizer

from base.errors import UserError
from base.files import FileRecord, committed_directory, record_file, sha256_of, write_json
from base.frozen import Frozen
from train.data.corpus import open_corpus
from train.data.documents import DatasetPart, Source, TextFile, TokenDocuments
from train.data.manifest import Manifest, read_manifest
from train.data.share import EVERYTHING, Share
from train.data.tokenizer import TOKENIZER_JSON, load_tokenizer

PART_JSON = "part.json"
DOCUMENTS_PER_CALL = 64
Document = NDArray[Any]


class Chosen(NamedTuple):
    """The documents that are kept of a source, and how much of each."""

    share: Share = EVERYTHING
    document_tokens: int | None = None  # at most, the end-of-text token included

    def cut(self, ids: Any, eos_token_id: int, dtype: np.dtype[Any]) -> Document:
        """Return the kept tokens of a document, with the end-of-text token."""
        kept = ids if self.document_tokens is None else ids[: self.document_tokens - 1]
        return np.array([*kept, eos_token_id], dtype)


ALL = Chosen()


class Made(Frozen):
    """The settings of a part: one made with others has to be made again."""

    source: Source
    tokenizer_sha256: str
    eos_token_id: int
    share: Share
    document_tokens: int | None


class Part(Made):
    """part.json: one source, beside `bin`, its tokens, and `lengths` of its documents, int32."""

    record: FileRecord  # of the source
    documents: int
    tokens: int
    max_token_id: int
    bin_sha256: str


class Vocabulary(NamedTuple):
    """A tokenizer and what every part needs to know about it."""

    tokenizer: Tokenizer
    eos_token_id: int
    sha256: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the type that tokens are written as."""
        return np.dtype(np.uint16 if self.tokenizer.get_vocab_size() <= 1 << 16 else np.int32)


@functools.cache
def vocabulary_of(directory: Path) -> Vocabulary:
    """Return the tokenizer of a directory; a worker loads it once for many sources."""
    return Vocabulary(*load_tokenizer(directory), sha256_of(directory / TOKENIZER_JSON))


def make_part(source: Source, tokenizer_dir: Path, directory: Path, chosen: Chosen) -> None:
    """Make the part of one source, unless a prepare that was killed has made it."""
    vocabulary = vocabulary_of(tokenizer_dir)
    made = Made(
        source=source,
        tokenizer_sha256=vocabulary.sha256,
        eos_token_id=vocabulary.eos_token_id,
        share=chosen.share,
        document_tokens=chosen.document_tokens,
    )
    if _is_made(directory, made):
        return
    documents, tokens, max_token_id = 0, 0, -1
    texts = _TextDigest()
    if isinstance(source, TokenDocuments):
        batches = _known_tokens(source, chosen, tokenizer_dir, vocabulary)
    else:
        batches = _tokenized(source, chosen, vocabulary, texts)
    with committed_directory(directory) as unfinished:
        with (
            (unfinished / "bin").open("wb") as file,
            (unfinished / "lengths").open("wb") as lengths,
        ):
            for batch in batches:
                joined = np.concatenate(batch)
                file.write(joined.tobytes())
                lengths.write(np.array([len(document) for document in batch], np.int32).tobytes())
                documents, tokens = documents + len(batch), tokens + len(joined)
                max_token_id = max(max_token_id, int(joined.max()))
        part = Part(
            **dict(made),
            record=texts.record if isinstance(source, DatasetPart) else _record_of(source),
            documents=documents,
            tokens=tokens,
            max_token_id=max_token_id,
            bin_sha256=record_file(unfinished / "bin").sha256,
        )
        write_json(unfinished / PART_JSON, part.model_dump(mode="json"))


def _is_made(directory: Path, made: Made) -> bool:
    """Return whether an earlier attempt left this part whole, of the source as it is now."""
    try:
        part = Part.model_validate_json((directory / PART_JSON).read_text())
        if Made(**part.model_dump(include=set(Made.model_fields))) != made:
            return False
        # The files of a dataset have no identity but their name.
        return isinstance(made.source, DatasetPart) or part.record == _record_of(made.source)
    except (FileNotFoundError, ValidationError):
        return False


def _record_of(source: TextFile | TokenDocuments) -> FileRecord:
    """Return size and hash of the file that a source is read from."""
    if isinstance(source, TextFile):
        return FileRecord(bytes=source.path.stat().st_size, sha256=sha256_of(source.path))
    manifest = read_manifest(source.prefix)
    if not isinstance(manifest, Manifest):
        raise UserError(
            f"{source.prefix} lists OLMo's token files, whose documents have no index; give text"
            " made by 'python -m train prepare'"
        )
    return manifest.bin


def token_bytes(document: Document) -> bytes:
    """Return the content of a document of a token file, for its place among all."""
    return document.astype("<i4").tobytes()


def _known_tokens(
    source: TokenDocuments, chosen: Chosen, tokenizer: Path, vocabulary: Vocabulary
) -> Iterator[list[Document]]:
    """Yield the chosen documents of a token file; UserError where another tokenizer made it."""
    corpus = open_corpus(source.prefix, verify_hashes=True)
    if corpus.manifest.tokenizer_sha256 != vocabulary.sha256:
        raise UserError(
            f"{source.prefix} was not made by the tokenizer in {tokenizer}; give the directory that"
            " made it"
        )
    for index in range(corpus.manifest.documents):
        document = corpus.document(index)
        if chosen.share.holds(token_bytes(document)):
            yield [chosen.cut(document[:-1], corpus.manifest.eos_token_id, vocabulary.dtype)]


class _TextDigest:
    """Size and hash of the texts of a part of a dataset, which is no file."""

    def __init__(self) -> None:
        self._digest, self._bytes = hashlib.sha256(), 0

    def add(self, text: str) -> None:
        content = text.encode() + b"\0"
        self._digest.update(content)
        self._bytes += len(content)

    @property
    def record(self) -> FileRecord:
        return FileRecord(bytes=self._bytes, sha256=self._digest.hexdigest())


def _tokenized(
    source: TextFile | DatasetPart, chosen: Chosen, vocabulary: Vocabulary, digest: _TextDigest
) -> Iterator[list[Document]]:
    """Yield the chosen documents of a text as tokens, some at a time."""
    texts = source.texts()
    if chosen.share != EVERYTHING:
        texts = (text for text in texts if chosen.share.holds(text.encode()))
    while batch := list(islice(texts, DOCUMENTS_PER_CALL)):
        encodings = vocabulary.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        yield [
            chosen.cut(encoding.ids, vocabulary.eos_token_id, vocabulary.dtype)
            for encoding in encodings
        ]
        if isinstance(source, DatasetPart):
            for text in batch:
                digest.add(text)
