"""What a run reads: every batch as a function of seed and step, and the held-out sequences.

Shapes: B sequences, S tokens of a sequence.
"""

import hashlib
import json
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.command import UserError
from train.config import RunConfig
from train.corpus import Corpus, NpyCorpus, check_vocabulary, open_source
from train.manifest import Manifest
from train.order import Blend, Order
from train.repetition import repetitive
from train.run_directory import RunDirectory, sha256_of
from train.tokenizer import TOKENIZER_JSON


class SequenceBatch(NamedTuple):
    """Sequences to train or to be measured on."""

    tokens_BS: NDArray[np.int64]  # [B, S + 1]: inputs are [:, :-1], labels [:, 1:]
    counted_BS: NDArray[np.bool_]  # [B, S]: the labels that enter the loss
    documents_BS: NDArray[np.int64] | None  # [B, S]: each input's document, counted from 0; None: not told apart


def batch(corpus: Corpus, *, step: int, batch_size: int, sequence_length: int, seed: int) -> NDArray[np.int64]:
    """The batch of update `step` (from 1) of a run on this token file alone, in the order 'permutation', [B, S + 1]."""
    order = Order("permutation", corpus.num_sequences(sequence_length), seed, batch_size)
    return corpus.sequences(order(np.arange((step - 1) * batch_size, step * batch_size)), sequence_length)


class RunData:
    """The data of one run: see `open_data`.

    Attributes:
        sha256: identity of the tokens, "train" and "held_out"; a blend has one of its parts and weights.
    """

    def __init__(self, run: RunConfig, train: list[Corpus | NpyCorpus], held_out: Corpus | NpyCorpus) -> None:
        self._run, self._train, self._held_out = run, train, held_out
        length, bounds = run.data.sequence_length, run.data.train_range
        self._first = bounds[0] if bounds else 0
        sizes = [bounds[1] - bounds[0] if bounds else corpus.num_sequences(length) for corpus in train]
        self._orders = [Order(run.data.order, size, run.seed, run.batch_size) for size in sizes]
        parts = run.data.train_sources
        self._blend = Blend([part.source for part in parts], [part.weight for part in parts], run.seed)
        weighted = [(corpus.manifest.sha256, part.weight) for corpus, part in zip(train, parts, strict=True)]
        blended = hashlib.sha256(json.dumps(weighted).encode()).hexdigest()
        self.sha256 = {
            "train": train[0].manifest.sha256 if len(train) == 1 else blended,
            "held_out": held_out.manifest.sha256,
        }

    def batch(self, step: int) -> SequenceBatch:
        """The whole global batch of update `step`, counted from 1; UserError for a token outside the vocabulary."""
        size = self._run.batch_size
        positions_B = np.arange((step - 1) * size, step * size)
        if len(self._train) == 1:
            found = self._read(self._train, np.zeros(size, np.int64), self._first + self._orders[0](positions_B))
        else:
            sources_B, indices_B = self._blend(positions_B)
            for source, order in enumerate(self._orders):
                indices_B[sources_B == source] = order(indices_B[sources_B == source])
            found = self._read(self._train, sources_B, indices_B)
        rule = self._run.data.repetition_filter
        if rule:
            found.counted_BS[repetitive(found.tokens_BS[:, :-1], rule)] = False
        return found

    def held_out(self) -> SequenceBatch:
        """The sequences behind every held-out loss, in the order of the file, unfiltered."""
        start, stop = _held_out_range(self._run)
        return self._read([self._held_out], np.zeros(stop - start, np.int64), np.arange(start, stop))

    def _read(
        self, corpora: list[Corpus | NpyCorpus], sources_B: NDArray[np.int64], indices_B: NDArray[np.int64]
    ) -> SequenceBatch:
        size, length = len(indices_B), self._run.data.sequence_length
        tokens_BS = np.empty((size, length + 1), np.int64)
        counted_BS = np.ones((size, length), bool)
        for source, corpus in enumerate(corpora):
            rows_B = np.flatnonzero(sources_B == source)
            corpus.read(indices_B[rows_B], tokens_BS, rows_B)
            counted_BS[rows_B, -1] = corpus.last_label_counts
        if any(corpus.manifest.max_token_id is None for corpus in corpora):
            self._check_tokens(tokens_BS)
        if not self._run.data.document_masking:
            return SequenceBatch(tokens_BS, counted_BS, None)
        eos_B = np.array([corpus.manifest.eos_token_id for corpus in corpora])[sources_B]
        return SequenceBatch(tokens_BS, counted_BS, _documents(tokens_BS[:, :-1], eos_B))

    def _check_tokens(self, tokens_BS: NDArray[np.int64]) -> None:
        largest = int(tokens_BS.max())
        if largest >= self._run.model.vocab_size:
            raise UserError(
                f"a batch holds token {largest}, outside the model's vocabulary of {self._run.model.vocab_size}; "
                f"check the dtype the token files were indexed with, or raise model.vocab_size"
            )


def _documents(inputs_BS: NDArray[np.int64], eos_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many end-of-text tokens lie before each input: it belongs to the document it ends."""
    documents_BS = np.zeros(inputs_BS.shape, np.int64)
    np.cumsum(inputs_BS[:, :-1] == eos_B[:, None], axis=1, out=documents_BS[:, 1:])
    return documents_BS


def _held_out_range(run: RunConfig) -> tuple[int, int]:
    start = run.data.held_out_range[0] if run.data.held_out_range else 0
    return start, start + run.data.held_out_sequences


def _check_ranges(run: RunConfig, train: list[Corpus | NpyCorpus], held_out: Corpus | NpyCorpus) -> None:
    length, wanted = run.data.sequence_length, run.data.held_out_sequences
    for corpus in train:
        available = corpus.num_sequences(length)
        if run.data.train_range and run.data.train_range[1] > available:
            raise UserError(
                f"data.train_range ends at {run.data.train_range[1]}, {corpus.prefix} holds {available} sequences of "
                f"{length} tokens; lower it"
            )
    available = held_out.num_sequences(length)
    start, stop = run.data.held_out_range or (0, available)
    if stop > available:
        raise UserError(f"data.held_out_range ends at {stop}, {held_out.prefix} holds {available} sequences; lower it")
    if stop - start < wanted:
        raise UserError(
            f"{held_out.prefix} holds {stop - start} sequences, data.held_out_sequences asks for {wanted}; "
            f"prepare more held-out text or ask for fewer"
        )


def _used(corpus: Corpus | NpyCorpus, length: int, bounds: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Of every file in use, by path and by hash, the range of its own sequences that lies in `bounds`."""
    used = {}
    for extent in corpus.extents(length):
        start, stop = max(bounds[0], extent.first), min(bounds[1], extent.stop)
        if start < stop:
            local = (start - extent.first, stop - extent.first)
            used[str(extent.path)] = local
            if extent.sha256:
                used[extent.sha256] = local
    return used


def _check_held_out_is_unseen(run: RunConfig, train: list[Corpus | NpyCorpus], held_out: Corpus | NpyCorpus) -> None:
    """UserError if a held-out sequence, or a source of the held-out text, is trained on."""
    length = run.data.sequence_length
    measured = _used(held_out, length, _held_out_range(run))
    for corpus in train:
        trained = _used(corpus, length, run.data.train_range or (0, corpus.num_sequences(length)))
        for file in sorted(measured.keys() & trained.keys()):
            (start, stop), (first, last) = measured[file], trained[file]
            if start < last and first < stop:
                raise UserError(
                    f"{held_out.prefix} is trained on: its sequences {start} to {stop} lie in {corpus.prefix}; "
                    f"set data.train_range and data.held_out_range apart or hold out another file"
                )
        if corpus.manifest.sha256 != held_out.manifest.sha256:
            _check_sources_differ(corpus, held_out)


def _check_sources_differ(corpus: Corpus | NpyCorpus, held_out: Corpus | NpyCorpus) -> None:
    if not isinstance(corpus.manifest, Manifest) or not isinstance(held_out.manifest, Manifest):
        return
    shares = corpus.manifest.share, held_out.manifest.share
    if shares[0] and shares[1] and not shares[0].overlaps(shares[1]):
        return
    made_from = {record.sha256 for record in corpus.manifest.sources.values() if record.bytes}
    for name, record in held_out.manifest.sources.items():
        if record.sha256 in made_from or (name.startswith("dataset:") and name in corpus.manifest.sources):
            raise UserError(
                f"{held_out.prefix} is trained on: {corpus.prefix} was made from {name} too; "
                f"prepare the held-out text from other sources"
            )


def _check_tokenizer(run: RunConfig, directory: RunDirectory, corpora: list[Corpus | NpyCorpus]) -> None:
    tokenizer = directory.resolve(run.data.tokenizer) / TOKENIZER_JSON
    if not tokenizer.is_file():
        raise UserError(f"{tokenizer} does not exist; let data.tokenizer name the directory that made the tokens")
    tokenizer_sha256 = sha256_of(tokenizer)
    for corpus in corpora:
        if corpus.manifest.tokenizer_sha256 != tokenizer_sha256:
            raise UserError(f"{corpus.prefix} was not made by {tokenizer}; prepare it again with that tokenizer")


def open_data(run: RunConfig, directory: RunDirectory, *, verify_hashes: bool) -> RunData:
    """The data of a run, checked against the model and against itself before anything is built.

    Args:
        run: the configuration; its relative paths start at `directory`.
        directory: the run directory.
        verify_hashes: hash files that are small enough for a start; one rank is enough.

    Raises:
        UserError: files missing, edited or too short, another tokenizer, tokens outside the vocabulary, or held-out
            sequences that are trained on.
    """
    train = [open_source(directory.resolve(part.source), verify_hashes) for part in run.data.train_sources]
    held_out = open_source(directory.resolve(run.data.held_out), verify_hashes)
    for corpus in (*train, held_out):
        check_vocabulary(corpus, run.model.vocab_size)
    _check_ranges(run, train, held_out)
    _check_tokenizer(run, directory, [*train, held_out])
    _check_held_out_is_unseen(run, train, held_out)
    return RunData(run, train, held_out)
