"""Text to token files: the work of `python -m train prepare`.

Every source becomes a part of its own, kept beside the result until that is complete. So a killed
prepare resumes, and the number of workers changes no byte. Nothing is held that grows with the
text.
"""

import contextlib
import functools
import multiprocessing
import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from base.errors import UserError
from base.files import (
    FileRecord,
    committed_directory,
    first_damage,
    hash_file,
    record_files,
    scratch_directory,
    sha256_of,
    write_sealed,
)
from base.frozen import Frozen
from base.progress import Progress
from base.reading import as_model, read_sealed
from train.data.corpus import commit_corpus, join_pieces, open_corpus
from train.data.documents import (
    DatasetPart,
    Source,
    TextFile,
    TokenDocuments,
    check_given_once,
    parse_source,
)
from train.data.manifest import EVERYTHING, Manifest, Share, SpecialTokens
from train.data.tokenizer import TOKENIZER_JSON, load_tokenizer, special_tokens, vocabulary_size

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
    record: FileRecord | None  # of the file; the URL of one on the hub holds its commit
    tokenizer_sha256: str
    eos_token_id: int
    chosen: Selection


class PreparedSource(Frozen):
    """part.json: one source, beside `bin`, its tokens, and `lengths` of its documents, int32."""

    origin: Origin
    files: dict[str, FileRecord]  # `bin` and `lengths`
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


class Chunk(NamedTuple):
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


def make_part(
    source: Source, tokenizer_dir: Path, directory: Path, selection: Selection
) -> PreparedSource:
    """Make the part of one source, unless a prepare that was killed has made it."""
    vocabulary = vocabulary_of(tokenizer_dir)
    origin = Origin(
        source=source,
        record=_record_of(source),
        tokenizer_sha256=vocabulary.sha256,
        eos_token_id=vocabulary.eos_token_id,
        chosen=selection,
    )
    # A part of other settings or of a changed source, or a damaged one, is made again.
    with contextlib.suppress(FileNotFoundError, UserError):
        part_json = directory / PART_JSON
        part = as_model(PreparedSource, read_sealed(part_json, "prepare again"), part_json)
        if part.origin == origin and not first_damage(directory, part.files):
            return part

    with committed_directory(directory) as unfinished:
        part = _write_tokens(unfinished, origin, vocabulary)
        write_sealed(unfinished / PART_JSON, part.model_dump(mode="json"))
    return part


def _write_tokens(directory: Path, origin: Origin, vocabulary: Vocabulary) -> PreparedSource:
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
    return PreparedSource(
        origin=origin,
        files=record_files(directory, "sha256"),
        documents=documents,
        tokens=tokens,
        max_token_id=max_token_id,
        typed_special_tokens=typed,
    )


def _record_of(source: Source) -> FileRecord | None:
    """Return size and hash of the file that a source is read from, if it is one."""
    match source:
        case TokenDocuments():
            return open_corpus(source.prefix).manifest.bin
        case TextFile(path=file) | DatasetPart(file=file):
            return hash_file(Path(file), "sha256") if Path(file).is_file() else None
        case _:
            assert_never(source)


def token_bytes(document: Document) -> bytes:
    """Return the content of a document of a token file, for its place among all."""
    return document.astype("<i4").tobytes()


def _known_tokens(origin: Origin, vocabulary: Vocabulary) -> Iterator[Chunk]:
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
            # `cut` adds an end-of-text token of its own.
            yield Chunk([selection.cut(document[:-1], eos_token_id, vocabulary.dtype)])


def _tokenized(origin: Origin, vocabulary: Vocabulary) -> Iterator[Chunk]:
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
        yield Chunk(  # encodings are large: none is kept until the next ones
            [document(encoding.ids) for encoding in encode(batch, add_special_tokens=False)],
            sum(len(pattern.findall(text)) for text in batch),
        )


def prepare(
    sources: Sequence[Path | Source],
    tokenizer_dir: Path,
    prefix: Path,
    *,
    workers: int = 1,
    selection: Selection = ALL,
    at_least: int = 0,
) -> Manifest:
    """Tokenize sources in the given order into PREFIX.bin/.idx, then write the manifest.

    Every document gets the end-of-text token at its end; nothing else is added, and nothing is
    lost, whatever the tokenizer's file says of truncation and padding. Finished parts are in
    .PREFIX.parts until the result is written, so a prepare after a kill makes only the others.

    Raises:
        UserError: a source is missing, damaged or given twice, or there are fewer than `at_least`
            tokens.
    """
    all_sources = _named_sources(sources)
    special_tokens = _special_tokens(all_sources, selection)
    vocabulary_of.cache_clear()  # this process may have loaded another tokenizer from there before
    vocabulary = vocabulary_of(tokenizer_dir)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    parts_dir = prefix.parent / f".{prefix.name}.parts"
    with scratch_directory(prefix.parent / f".{prefix.name}.partial") as unfinished:
        parts_dir.mkdir(exist_ok=True)
        directories = [parts_dir / f"{index:06d}" for index in range(len(all_sources))]
        try:
            parts = _make_parts(all_sources, tokenizer_dir, directories, workers, selection)
            if not any(part.documents for part in parts):
                shutil.rmtree(parts_dir)
                raise UserError(
                    f"no document in {len(all_sources)} source(s); give files that hold text"
                )
            tokens = sum(part.tokens for part in parts)
            if tokens < at_least:
                raise UserError(
                    f"{prefix} would hold {tokens:,} tokens, {at_least:,} are needed; give more"
                    " text"
                )
            files = _join_parts(directories, parts, unfinished, vocabulary)
        finally:
            # Parts of a prepare that failed stay, for the next one.
            if parts_dir.exists() and not any(parts_dir.iterdir()):
                parts_dir.rmdir()

        manifest = _manifest(parts, files, vocabulary, selection.share, special_tokens)
        commit_corpus(prefix, unfinished, manifest)
        # Last: a prepare that is killed before this finds its parts again.
        shutil.rmtree(parts_dir)
    return manifest


def _named_sources(sources: Sequence[Path | Source]) -> list[Source]:
    """Return all sources that paths and sources name; UserError for one given twice."""
    all_sources: list[Source] = []
    for source in sources:
        all_sources += parse_source(str(source)) if isinstance(source, Path) else [source]
    check_given_once(all_sources)
    return all_sources


def _special_tokens(sources: list[Source], selection: Selection) -> SpecialTokens:
    """Return how special tokens typed in the text are read; UserError where sources differ."""
    ways: set[SpecialTokens] = {
        open_corpus(source.prefix).manifest.special_tokens
        if isinstance(source, TokenDocuments)
        else selection.special_tokens
        for source in sources
    }
    if selection.special_tokens != ALL.special_tokens:  # asked for, of token files too
        ways.add(selection.special_tokens)
    if len(ways) > 1:
        raise UserError(
            "token files and text would differ in how special tokens typed in them are read; give"
            " --parse-special-tokens for all of them or for none"
        )
    return ways.pop()


def _join_parts(
    directories: list[Path], parts: list[PreparedSource], target: Path, vocabulary: Vocabulary
) -> dict[str, FileRecord]:
    """Write `bin` and `idx` of all parts to `target`; return their records."""
    pieces = [
        (directory / "bin", np.memmap(directory / "lengths", np.int32, mode="r").view(np.ndarray))
        for directory, part in zip(directories, parts, strict=True)
        if part.documents  # an empty file cannot be mapped
    ]
    return join_pieces(pieces, target, vocabulary.dtype)


def _manifest(
    parts: list[PreparedSource],
    files: dict[str, FileRecord],
    vocabulary: Vocabulary,
    share: Share,
    special_tokens: SpecialTokens,
) -> Manifest:
    return Manifest(
        vocab_size=vocabulary.size,
        eos_token_id=vocabulary.eos_token_id,
        max_token_id=max(part.max_token_id for part in parts),
        documents=sum(part.documents for part in parts),
        tokens=sum(part.tokens for part in parts),
        tokenizer_sha256=vocabulary.sha256,
        share=None if share == EVERYTHING else share,
        special_tokens=special_tokens,
        typed_special_tokens=sum(part.typed_special_tokens for part in parts),
        bin=files["bin"],
        idx=files["idx"],
        sources={
            part.origin.source.name: part.origin.record or part.files["bin"] for part in parts
        },
    )


def _make_parts(
    sources: list[Source],
    tokenizer_dir: Path,
    directories: list[Path],
    workers: int,
    selection: Selection,
) -> list[PreparedSource]:
    """Make the parts of all sources, each by one of the workers; return them in order."""
    parts = []
    with Progress("prepare", total=len(sources)) as progress:
        if workers == 1:
            for source, directory in zip(sources, directories, strict=True):
                parts.append(make_part(source, tokenizer_dir, directory, selection))
                progress.advance()
            return parts
        spawn = multiprocessing.get_context("spawn")  # tokenizers' threads do not survive a fork
        with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker) as pool:
            futures = [
                pool.submit(make_part, source, tokenizer_dir, directory, selection)
                for source, directory in zip(sources, directories, strict=True)
            ]
            try:
                for future in futures:
                    parts.append(future.result())
                    progress.advance()
            except BrokenProcessPool:
                raise UserError(
                    "a worker was killed, perhaps for memory; run again with fewer --workers"
                ) from None
            finally:
                # After a failure the parts that have not begun are not waited for.
                pool.shutdown(cancel_futures=True)
    return parts


def _start_worker() -> None:
    """Tokenize with one thread in a worker, and end the worker when its parent is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
