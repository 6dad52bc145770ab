"""Text to token files: the work of `python -m train prepare`.

Every source becomes a part of its own, kept beside the result until that is complete. So a killed
prepare resumes, and the number of workers changes no byte. Nothing is held that grows with the
text. `train.data.part` makes a part; `train.data.corpus_writer` joins them.
"""

import multiprocessing
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from base.errors import UserError
from base.files import FileRecord, scratch_directory
from base.progress import Progress
from base.reading import read_model
from train.data.corpus import open_corpus
from train.data.corpus_writer import commit_corpus, join_pieces
from train.data.documents import Source, TokenDocuments, check_given_once, parse_source
from train.data.manifest import Manifest, SpecialTokens
from train.data.part import (
    ALL,
    PART_JSON,
    Part,
    Selection,
    Vocabulary,
    make_part,
    vocabulary_of,
)
from train.data.share import EVERYTHING, Share


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
            _make_parts(all_sources, tokenizer_dir, directories, workers, selection)
            parts = [read_model(Part, directory / PART_JSON) for directory in directories]
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
    directories: list[Path], parts: list[Part], target: Path, vocabulary: Vocabulary
) -> dict[str, FileRecord]:
    """Write `bin` and `idx` of all parts to `target`; return their records."""
    pieces = [
        (place / "bin", np.memmap(place / "lengths", np.int32, mode="r").view(np.ndarray))
        for place, part in zip(directories, parts, strict=True)
        if part.documents  # an empty file cannot be mapped
    ]
    return join_pieces(pieces, target, vocabulary.dtype)


def _manifest(
    parts: list[Part],
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
        sources={part.origin.source.name: part.origin.record or part.bin for part in parts},
    )


def _make_parts(
    sources: list[Source],
    tokenizer_dir: Path,
    directories: list[Path],
    workers: int,
    selection: Selection,
) -> None:
    with Progress("prepare", total=len(sources)) as progress:
        if workers == 1:
            for source, directory in zip(sources, directories, strict=True):
                make_part(source, tokenizer_dir, directory, selection)
                progress.advance()
            return
        spawn = multiprocessing.get_context("spawn")  # tokenizers' threads do not survive a fork
        with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker) as pool:
            futures = [
                pool.submit(make_part, source, tokenizer_dir, directory, selection)
                for source, directory in zip(sources, directories, strict=True)
            ]
            try:
                for future in futures:
                    future.result()
                    progress.advance()
            except BrokenProcessPool:
                raise UserError(
                    "a worker was killed, perhaps for memory; run again with fewer --workers"
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Tokenize with one thread in a worker, and end the worker when its parent is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
