"""One source of a prepare, tokenized: the documents that are chosen of it, beside a record of what made them.

`train.prepare` makes a part per source, in worker processes, and joins them.
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

from train.command import UserError
from train.corpus import open_corpus
from train.documents import DatasetPart, TextFile, TokenDocuments
from train.frozen import Frozen
from train.manifest import Manifest, read_manifest
from train.run_directory import FileRecord, committed_directory, record_files, sha256_of, write_json
from train.share import EVERYTHING, Share
from train.tokenizer import TOKENIZER_JSON, load_tokenizer

PART_JSON = "part.json"
DOCUMENTS_PER_CALL = 64
Source = TextFile | DatasetPart | TokenDocuments
Document = NDArray[Any]


class Chosen(NamedTuple):
    """The documents that are kept of a source, and how much of each."""

    share: Share = EVERYTHING
    document_tokens: int | None = None  # at most, the end-of-text token included

    def cut(self, ids: Any, eos_token_id: int, dtype: np.dtype[Any]) -> Document:
        """Return a document's tokens with the end-of-text token, as many as are kept."""
        kept = ids if self.document_tokens is None else ids[: self.document_tokens - 1]
        return np.array([*kept, eos_token_id], dtype)


ALL = Chosen()


class Part(Frozen):
    """part.json: one source, tokenized. Beside it lie `bin`, the tokens, and `lengths`, int32, of the documents."""

    source: Source
    tokenizer_sha256: str
    eos_token_id: int
    share: Share
    document_tokens: int | None
    record: FileRecord
    documents: int
    tokens: int
    max_token_id: int
    bin_sha256: str


@functools.cache
def tokenizer_of(directory: Path) -> tuple[Tokenizer, int, str]:
    """Return the tokenizer, its end-of-text token and its hash; a worker loads it once for many sources."""
    return *load_tokenizer(directory), sha256_of(directory / TOKENIZER_JSON)


def token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    """Return the type that tokens are written as."""
    return np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32)


def _is_made(directory: Path, expected: dict[str, Any], source: Source) -> bool:
    """Return True where an earlier attempt left this part, of this very source, whole."""
    try:
        part = Part.model_validate_json((directory / PART_JSON).read_text())
    except (FileNotFoundError, ValidationError):
        return False
    if part.model_dump(mode="json", include=set(expected)) != expected:
        return False
    if isinstance(source, DatasetPart):
        return True
    if isinstance(source, TokenDocuments):
        return part.record == _token_record(source)
    path = source.path
    return path.is_file() and path.stat().st_size == part.record.bytes and sha256_of(path) == part.record.sha256


def _token_record(source: TokenDocuments) -> FileRecord:
    manifest = read_manifest(source.prefix)
    if not isinstance(manifest, Manifest):
        raise UserError(
            f"{source.prefix} lists OLMo's token files, whose documents have no index; give text made by "
            "'python -m train prepare'"
        )
    return manifest.bin


def _known_tokens(
    source: TokenDocuments, chosen: Chosen, tokenizer: Path, sha256: str, dtype: np.dtype[Any]
) -> Iterator[list[Document]]:
    """Yield the chosen documents of a token file; UserError where another tokenizer made it."""
    corpus = open_corpus(source.prefix, verify_hashes=True)
    if corpus.manifest.tokenizer_sha256 != sha256:
        raise UserError(
            f"{source.prefix} was not made by the tokenizer in {tokenizer}; give the directory that made it"
        )
    for index in range(corpus.manifest.documents):
        document = corpus.document(index)
        if chosen.share.holds(token_bytes(document)):
            yield [chosen.cut(document[:-1], corpus.manifest.eos_token_id, dtype)]


def token_bytes(document: Document) -> bytes:
    """Return the content of a document of a token file, for its place among all."""
    return document.astype("<i4").tobytes()


class _Digest:
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
    source: TextFile | DatasetPart, chosen: Chosen, tokenizer: Tokenizer, eos_token_id: int, read: _Digest
) -> Iterator[list[Document]]:
    """Yield the chosen documents of a text as tokens, some at a time."""
    texts, dtype = source.texts(), token_dtype(tokenizer)
    if chosen.share != EVERYTHING:
        texts = (text for text in texts if chosen.share.holds(text.encode()))
    while batch := list(islice(texts, DOCUMENTS_PER_CALL)):
        encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        yield [chosen.cut(encoding.ids, eos_token_id, dtype) for encoding in encodings]
        if isinstance(source, DatasetPart):
            for text in batch:
                read.add(text)


def make_part(source: Source, tokenizer_dir: Path, directory: Path, chosen: Chosen) -> None:
    """Make the part of one source, unless an earlier attempt has."""
    tokenizer, eos_token_id, tokenizer_sha256 = tokenizer_of(tokenizer_dir)
    made_by = {
        "source": source.model_dump(mode="json"),
        "tokenizer_sha256": tokenizer_sha256,
        "eos_token_id": eos_token_id,
        "share": chosen.share.model_dump(mode="json"),
        "document_tokens": chosen.document_tokens,
    }
    if _is_made(directory, made_by, source):
        return
    dtype = token_dtype(tokenizer)
    documents, tokens, max_token_id = 0, 0, -1
    digest, read = hashlib.sha256(), _Digest()
    if isinstance(source, TokenDocuments):
        found = _known_tokens(source, chosen, tokenizer_dir, tokenizer_sha256, dtype)
    else:
        found = _tokenized(source, chosen, tokenizer, eos_token_id, read)
    with committed_directory(directory) as aside:
        with (aside / "bin").open("wb") as file, (aside / "lengths").open("wb") as lengths:
            for batch in found:
                joined = np.concatenate(batch)
                file.write(joined.tobytes())
                digest.update(joined.tobytes())
                lengths.write(np.array([len(document) for document in batch], np.int32).tobytes())
                documents, tokens = documents + len(batch), tokens + len(joined)
                max_token_id = max(max_token_id, int(joined.max()))
        assert record_files(aside)["bin"].sha256 == digest.hexdigest(), "what was written is not what was tokenized"
        made = Part(
            source=source,
            tokenizer_sha256=tokenizer_sha256,
            eos_token_id=eos_token_id,
            share=chosen.share,
            document_tokens=chosen.document_tokens,
            record=_record_of(source, read),
            documents=documents,
            tokens=tokens,
            max_token_id=max_token_id,
            bin_sha256=digest.hexdigest(),
        )
        write_json(aside / PART_JSON, made.model_dump(mode="json"))


def _record_of(source: Source, read: _Digest) -> FileRecord:
    if isinstance(source, DatasetPart):
        return read.record
    if isinstance(source, TokenDocuments):
        return _token_record(source)
    return FileRecord(bytes=source.path.stat().st_size, sha256=sha256_of(source.path))
