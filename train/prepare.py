"""Text to token files: the work behind `python -m train prepare`.

Every source becomes a part of its own, kept beside the result until that is complete: a killed prepare goes on, and
neither the number of workers nor of shards changes a byte. Nothing is held that grows with the text.
"""

import functools
import hashlib
import multiprocessing
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from tokenizers import Tokenizer

from train.command import Progress, UserError
from train.corpus_writer import Piece, commit_corpus, join_pieces
from train.documents import DatasetPart, TextFile
from train.frozen import Frozen
from train.manifest import Manifest
from train.run_directory import (
    FileRecord,
    committed_directory,
    record_files,
    scratch_directory,
    sha256_of,
    write_json,
)
from train.shards import shard_prefix
from train.tokenizer import TOKENIZER_JSON, load_tokenizer

PART_JSON = "part.json"
DOCUMENTS_PER_CALL = 64


class Part(Frozen):
    """part.json: one source, tokenized. Beside it lie `bin`, the tokens, and `lengths`, int32, of the documents."""

    source: TextFile | DatasetPart
    tokenizer_sha256: str
    eos_token_id: int
    record: FileRecord
    documents: int
    tokens: int
    max_token_id: int
    bin_sha256: str


@functools.cache
def _tokenizer(directory: Path) -> tuple[Tokenizer, int, str]:
    """Loaded once per worker, which may tokenize many sources."""
    return *load_tokenizer(directory), sha256_of(directory / TOKENIZER_JSON)


def _token_dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.int32)


def _is_made(directory: Path, expected: dict[str, Any], source: TextFile | DatasetPart) -> bool:
    """Whether an earlier attempt left this part, of this very source, whole."""
    try:
        part = Part.model_validate_json((directory / PART_JSON).read_text())
    except (FileNotFoundError, ValidationError):
        return False
    if part.model_dump(mode="json", include=set(expected)) != expected:
        return False
    if isinstance(source, DatasetPart):
        return True
    path = source.path
    return path.is_file() and path.stat().st_size == part.record.bytes and sha256_of(path) == part.record.sha256


def _tokenize(source: TextFile | DatasetPart, tokenizer_dir: Path, directory: Path) -> None:
    """Makes the part of one source, unless an earlier attempt has."""
    tokenizer, eos_token_id, tokenizer_sha256 = _tokenizer(tokenizer_dir)
    made_by = {
        "source": source.model_dump(mode="json"),
        "tokenizer_sha256": tokenizer_sha256,
        "eos_token_id": eos_token_id,
    }
    if _is_made(directory, made_by, source):
        return
    dtype = _token_dtype(tokenizer)
    documents, tokens, max_token_id = 0, 0, -1
    digest, read, read_bytes = hashlib.sha256(), hashlib.sha256(), 0
    with committed_directory(directory) as aside:
        with (aside / "bin").open("wb") as file, (aside / "lengths").open("wb") as lengths:
            texts = source.texts()
            while batch := list(islice(texts, DOCUMENTS_PER_CALL)):
                encodings = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                arrays = [np.array([*encoding.ids, eos_token_id], dtype) for encoding in encodings]
                joined = np.concatenate(arrays)
                file.write(joined.tobytes())
                digest.update(joined.tobytes())
                lengths.write(np.array([len(array) for array in arrays], np.int32).tobytes())
                documents, tokens = documents + len(arrays), tokens + len(joined)
                max_token_id = max(max_token_id, int(joined.max()))
                if isinstance(source, DatasetPart):
                    for content in (text.encode() + b"\0" for text in batch):
                        read.update(content)
                        read_bytes += len(content)
        if isinstance(source, DatasetPart):
            record = FileRecord(bytes=read_bytes, sha256=read.hexdigest())
        else:
            record = FileRecord(bytes=source.path.stat().st_size, sha256=sha256_of(source.path))
        assert record_files(aside)["bin"].sha256 == digest.hexdigest(), "what was written is not what was tokenized"
        made = Part(
            source=source,
            tokenizer_sha256=tokenizer_sha256,
            eos_token_id=eos_token_id,
            record=record,
            documents=documents,
            tokens=tokens,
            max_token_id=max_token_id,
            bin_sha256=digest.hexdigest(),
        )
        write_json(aside / PART_JSON, made.model_dump(mode="json"))


def _start_worker() -> None:
    """In a worker: one thread for tokenizing, and an end with the process that started it, should that be killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _tokenize_all(sources: list[TextFile | DatasetPart], tokenizer_dir: Path, parts: list[Path], workers: int) -> None:
    with Progress("prepare", total=len(sources)) as progress:
        if workers == 1:
            for source, part in zip(sources, parts, strict=True):
                _tokenize(source, tokenizer_dir, part)
                progress.advance()
            return
        spawn = multiprocessing.get_context("spawn")  # tokenizers' threads do not survive a fork
        with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker) as pool:
            futures = [
                pool.submit(_tokenize, source, tokenizer_dir, part) for source, part in zip(sources, parts, strict=True)
            ]
            try:
                for future in futures:
                    future.result()
                    progress.advance()
            except BrokenProcessPool:
                raise UserError("a worker was killed, perhaps for memory; run again with fewer --workers") from None
            finally:
                pool.shutdown(cancel_futures=True)


def _pieces(directories: list[Path], parts: list[Part]) -> Iterator[Piece]:
    for directory, part in zip(directories, parts, strict=True):
        if part.documents:
            yield Piece(directory / "bin", part.bin_sha256, np.memmap(directory / "lengths", np.int32, mode="r"))


def prepare(
    sources: Sequence[Path | DatasetPart],
    tokenizer_dir: Path,
    prefix: Path,
    *,
    key: str = "text",
    workers: int = 1,
    shard: tuple[int, int] | None = None,
) -> Manifest:
    """Tokenizes the sources in the given order into PREFIX.bin/.idx and PREFIX.json, the manifest, written last.

    Every document gets the end-of-text token at its end; nothing else is added. Finished sources lie in .PREFIX.parts
    until the whole is written, so a prepare that was killed goes on with the others.

    Args:
        sources: files, see `train.documents.read_documents`, and parts of datasets.
        tokenizer_dir: HF directory of the tokenizer.
        prefix: what the files are called.
        key: where JSON lines and parquet files hold the text.
        workers: processes; a source is read by one of them.
        shard: (i, n) takes the i-th of n parts of the sources and names the result `shard_prefix(prefix, i, n)`.

    Raises:
        UserError: a source that is missing, damaged or holds no text, or too few of them.
    """
    named = [TextFile(path=source, key=key) if isinstance(source, Path) else source for source in sources]
    for name, times in Counter(source.name for source in named).items():
        if times > 1:
            raise UserError(f"{name} is given {times} times; give every source once")
    if shard:
        number, shards = shard
        if len(named) < shards:
            raise UserError(f"{len(named)} source(s) do not divide into {shards} shards; use fewer shards")
        named = named[(number - 1) * len(named) // shards : number * len(named) // shards]
        prefix = shard_prefix(prefix, number, shards)
    _tokenizer.cache_clear()  # an earlier call of this process may have found another tokenizer there
    tokenizer, eos_token_id, tokenizer_sha256 = _tokenizer(tokenizer_dir)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    kept = prefix.parent / f".{prefix.name}.parts"
    with scratch_directory(prefix.parent / f".{prefix.name}.partial") as aside:
        kept.mkdir(exist_ok=True)
        directories = [kept / f"{index:06d}" for index in range(len(named))]
        try:
            _tokenize_all(named, tokenizer_dir, directories, workers)
            parts = [Part.model_validate_json((part / PART_JSON).read_text()) for part in directories]
            if not any(part.documents for part in parts):
                shutil.rmtree(kept)
                raise UserError(f"no document in {len(named)} source(s); give files that hold text")
            files = join_pieces(_pieces(directories, parts), aside, _token_dtype(tokenizer))
        finally:
            if kept.exists() and not any(kept.iterdir()):
                kept.rmdir()
        manifest = Manifest(
            vocab_size=tokenizer.get_vocab_size(),
            eos_token_id=eos_token_id,
            max_token_id=max(part.max_token_id for part in parts),
            documents=sum(part.documents for part in parts),
            tokens=sum(part.tokens for part in parts),
            tokenizer_sha256=tokenizer_sha256,
            bin=files["bin"],
            idx=files["idx"],
            sources={part.source.name: part.record for part in parts},
        )
        commit_corpus(prefix, aside, manifest)
        shutil.rmtree(kept)
    return manifest
