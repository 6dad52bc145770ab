"""Text to token files: the work behind `python -m train prepare`.

Every source becomes a part of its own, kept beside the result until that is complete: a killed prepare goes on, and
neither the number of workers nor of shards changes a byte. Nothing is held that grows with the text.
"""

import multiprocessing
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from train.command import Progress, UserError
from train.corpus_writer import Piece, commit_corpus, join_pieces
from train.documents import DatasetPart, TextFile, TokenDocuments
from train.manifest import Manifest
from train.part import ALL, PART_JSON, Chosen, Part, Source, make_part, token_dtype, tokenizer_of
from train.run_directory import scratch_directory
from train.shards import shard_prefix
from train.share import EVERYTHING


def _start_worker() -> None:
    """In a worker: one thread for tokenizing, and an end with the process that started it, should that be killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _tokenize_all(sources: list[Source], tokenizer_dir: Path, parts: list[Path], workers: int, chosen: Chosen) -> None:
    with Progress("prepare", total=len(sources)) as progress:
        if workers == 1:
            for source, part in zip(sources, parts, strict=True):
                make_part(source, tokenizer_dir, part, chosen)
                progress.advance()
            return
        spawn = multiprocessing.get_context("spawn")  # tokenizers' threads do not survive a fork
        with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker) as pool:
            futures = [
                pool.submit(make_part, source, tokenizer_dir, part, chosen)
                for source, part in zip(sources, parts, strict=True)
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


def _named(path: Path, key: str) -> Source:
    """Return what a path stands for: a file of text, or PREFIX of a token file."""
    if not path.exists() and Path(f"{path}.json").is_file():
        return TokenDocuments(prefix=path)
    return TextFile(path=path, key=key)


def prepare(
    sources: Sequence[Path | DatasetPart],
    tokenizer_dir: Path,
    prefix: Path,
    *,
    key: str = "text",
    workers: int = 1,
    shard: tuple[int, int] | None = None,
    chosen: Chosen = ALL,
    at_least: int = 0,
) -> Manifest:
    """Tokenizes the sources in the given order into PREFIX.bin/.idx and PREFIX.json, the manifest, written last.

    Every document gets the end-of-text token at its end; nothing else is added. Finished sources lie in .PREFIX.parts
    until the whole is written, so a prepare that was killed goes on with the others.

    Args:
        sources: files, see `train.documents.read_documents`, PREFIXes of token files, and parts of datasets.
        tokenizer_dir: HF directory of the tokenizer.
        prefix: what the files are called.
        key: where JSON lines and parquet files hold the text.
        workers: processes; a source is read by one of them.
        shard: (i, n) takes the i-th of n parts of the sources and names the result `shard_prefix(prefix, i, n)`.
        chosen: the documents that are kept, and how much of each.
        at_least: tokens that have to come out.

    Raises:
        UserError: a source that is missing, damaged or holds no text, too few of them, or too few tokens.
    """
    named = [_named(source, key) if isinstance(source, Path) else source for source in sources]
    for name, times in Counter(source.name for source in named).items():
        if times > 1:
            raise UserError(f"{name} is given {times} times; give every source once")
    if shard:
        number, shards = shard
        if len(named) < shards:
            raise UserError(f"{len(named)} source(s) do not divide into {shards} shards; use fewer shards")
        named = named[(number - 1) * len(named) // shards : number * len(named) // shards]
        prefix = shard_prefix(prefix, number, shards)
    tokenizer_of.cache_clear()  # an earlier call of this process may have found another tokenizer there
    tokenizer, eos_token_id, tokenizer_sha256 = tokenizer_of(tokenizer_dir)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    kept = prefix.parent / f".{prefix.name}.parts"
    with scratch_directory(prefix.parent / f".{prefix.name}.partial") as aside:
        kept.mkdir(exist_ok=True)
        directories = [kept / f"{index:06d}" for index in range(len(named))]
        try:
            _tokenize_all(named, tokenizer_dir, directories, workers, chosen)
            parts = [Part.model_validate_json((part / PART_JSON).read_text()) for part in directories]
            if not any(part.documents for part in parts):
                shutil.rmtree(kept)
                raise UserError(f"no document in {len(named)} source(s); give files that hold text")
            tokens = sum(part.tokens for part in parts)
            if tokens < at_least:
                raise UserError(f"{prefix} would hold {tokens:,} tokens, {at_least:,} are needed; give more text")
            files = join_pieces(_pieces(directories, parts), aside, token_dtype(tokenizer))
        finally:
            if kept.exists() and not any(kept.iterdir()):
                kept.rmdir()
        manifest = Manifest(
            vocab_size=tokenizer.get_vocab_size(),
            eos_token_id=eos_token_id,
            max_token_id=max(part.max_token_id for part in parts),
            documents=sum(part.documents for part in parts),
            tokens=tokens,
            tokenizer_sha256=tokenizer_sha256,
            share=None if chosen.share == EVERYTHING else chosen.share,
            bin=files["bin"],
            idx=files["idx"],
            sources={part.source.name: part.record for part in parts},
        )
        commit_corpus(prefix, aside, manifest)
        shutil.rmtree(kept)
    return manifest
