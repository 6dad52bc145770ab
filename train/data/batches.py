"""Batches of a run as functions of seed and step, and the held-out sequences.

`open_data` checks the token files of a run; `RunData` reads them for the loop; both engines take a
`Batch`. The order of sequences is in `train.data.order`.

Shapes: B sequences, S tokens of a sequence.
"""

import hashlib
import json
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from base.errors import UserError
from base.files import sha256_of
from train.data.corpus import Corpus, TokenSource, check_vocabulary, open_source
from train.data.manifest import Manifest
from train.data.order import Blend, Order
from train.data.repetition import repetitive
from train.data.tokenizer import TOKENIZER_JSON
from train.run.config import RunConfig
from train.run.directory import RunDirectory


class Batch(NamedTuple):
    """The sequences of one update, or of one held-out loss."""

    tokens_BS: Tensor  # int64 [B, S + 1]: inputs are [:, :-1], labels [:, 1:]
    counted_BS: Tensor  # bool [B, S]: the labels that enter the loss

    @staticmethod
    def of(tokens_BS: Tensor) -> "Batch":
        """Return a batch in which every label counts."""
        return Batch(tokens_BS, torch.ones_like(tokens_BS[:, 1:], dtype=torch.bool))

    def microbatches(
        self, size: int, *, rank: int, ranks: int, device: torch.device
    ) -> list["Batch"]:
        """Return one rank's part: its own of every `ranks` consecutive microbatches.

        Where the sequences do not suffice the first is repeated, without a label that counts.

        Args:
            size: sequences of a microbatch.
            rank: of data parallelism.
            ranks: number of data-parallel ranks.
            device: of the microbatches.
        """
        count = len(self.tokens_BS)
        number = -(-count // (size * ranks))

        def own(whole: Tensor, filler: Tensor) -> Tensor:
            padded = torch.cat([whole, filler.expand(number * ranks * size - count, -1)])
            by_rank = padded.reshape(number, ranks, size, -1)
            return by_rank[:, rank].to(device)

        tokens = own(self.tokens_BS, self.tokens_BS[:1])
        counted = own(self.counted_BS, torch.zeros_like(self.counted_BS[:1]))
        return [Batch(*fields) for fields in zip(tokens, counted, strict=True)]


def batch(
    corpus: Corpus, *, step: int, batch_size: int, sequence_length: int, seed: int
) -> NDArray[np.int64]:
    """Return the batch of update `step` (from 1) of a run on this token file alone, [B, S + 1].

    The order is 'permutation'.
    """
    order = Order("permutation", corpus.num_sequences(sequence_length), seed, batch_size)
    return corpus.sequences(
        order(np.arange((step - 1) * batch_size, step * batch_size)), sequence_length
    )


class RunData:
    """The data of one run: see `open_data`.

    Attributes:
        sha256: identity of the tokens, "train" and "held_out"; a blend has one of its parts and
            weights.
    """

    def __init__(self, run: RunConfig, train: list[TokenSource], held_out: TokenSource) -> None:
        self._run, self._train, self._held_out = run, train, held_out
        length, parts = run.data.sequence_length, run.data.train_sources
        self._orders = [
            Order(run.data.order, corpus.num_sequences(length), run.seed, run.batch_size)
            for corpus in train
        ]
        self._blend = Blend(
            [part.source for part in parts], [part.weight for part in parts], run.seed
        )
        weighted = [
            (corpus.manifest.sha256, part.weight) for corpus, part in zip(train, parts, strict=True)
        ]
        blended = hashlib.sha256(json.dumps(weighted).encode()).hexdigest()
        self.sha256 = {
            "train": train[0].manifest.sha256 if len(train) == 1 else blended,
            "held_out": held_out.manifest.sha256,
        }

    def batch(self, step: int) -> Batch:
        """Return the global batch of update `step`, counted from 1.

        Raises:
            UserError: a token outside the vocabulary.
        """
        size = self._run.batch_size
        positions_B = np.arange((step - 1) * size, step * size)
        if len(self._train) > 1:
            sources_B, ranks_B = self._blend(positions_B)
        else:
            sources_B, ranks_B = np.zeros_like(positions_B), positions_B
        indices_B = np.empty_like(ranks_B)
        for source, order in enumerate(self._orders):
            rows_B = sources_B == source
            indices_B[rows_B] = order(ranks_B[rows_B])
        return self._read(self._train, sources_B, indices_B, filtered=True)

    def held_out(self) -> Batch:
        """Return the first sequences of the held-out file, for every held-out loss, unfiltered."""
        indices_B = np.arange(self._run.data.held_out_sequences)
        return self._read([self._held_out], np.zeros_like(indices_B), indices_B, filtered=False)

    def _read(
        self,
        corpora: list[TokenSource],
        sources_B: NDArray[np.int64],
        indices_B: NDArray[np.int64],
        *,
        filtered: bool,
    ) -> Batch:
        """Read sequence `indices_B` of corpus `sources_B`, row by row."""
        data = self._run.data
        tokens_BS = np.empty((len(indices_B), data.sequence_length + 1), np.int64)
        counted_BS = np.ones((len(indices_B), data.sequence_length), bool)
        for source, corpus in enumerate(corpora):
            rows_B = sources_B == source
            tokens_BS[rows_B] = corpus.sequences(indices_B[rows_B], data.sequence_length)
            counted_BS[rows_B, -1] = corpus.last_label_counts
        if any(corpus.manifest.max_token_id is None for corpus in corpora):
            self._check_tokens(tokens_BS)
        if filtered and data.repetition_filter:
            counted_BS[repetitive(tokens_BS[:, :-1], data.repetition_filter)] = False
        return Batch(torch.from_numpy(tokens_BS), torch.from_numpy(counted_BS))

    def _check_tokens(self, tokens_BS: NDArray[np.int64]) -> None:
        largest = int(tokens_BS.max())
        if largest >= self._run.model.vocab_size:
            raise UserError(
                f"a batch holds token {largest}, outside the model's vocabulary of"
                f" {self._run.model.vocab_size}; check the dtype the token files were indexed with,"
                " or raise model.vocab_size"
            )


def open_data(run: RunConfig, directory: RunDirectory, *, verify_hashes: bool) -> RunData:
    """Open the data of a run, checked against the model and itself before anything is built.

    Args:
        run: the configuration; its relative paths start at `directory`.
        directory: the run directory.
        verify_hashes: hash files that are small enough for a start; one rank is enough.

    Raises:
        UserError: files missing, edited or too short, another tokenizer, tokens outside the
            vocabulary, or held-out sequences that are trained on.
    """
    train = [
        open_source(directory.resolve(part.source), verify_hashes)
        for part in run.data.train_sources
    ]
    held_out = open_source(directory.resolve(run.data.held_out), verify_hashes)
    for corpus in (*train, held_out):
        check_vocabulary(corpus, run.model.vocab_size)
        corpus.num_sequences(run.data.sequence_length)  # at least one
    _check_held_out_length(run, held_out)
    _check_tokenizer(run, directory, [*train, held_out])
    for corpus in train:
        _check_unseen(corpus, held_out)
    return RunData(run, train, held_out)


def _check_held_out_length(run: RunConfig, held_out: TokenSource) -> None:
    available, wanted = (
        held_out.num_sequences(run.data.sequence_length),
        run.data.held_out_sequences,
    )
    if available < wanted:
        raise UserError(
            f"{held_out.prefix} holds {available} sequences, data.held_out_sequences asks for"
            f" {wanted}; prepare more held-out text or ask for fewer"
        )


def _check_tokenizer(run: RunConfig, directory: RunDirectory, corpora: list[TokenSource]) -> None:
    tokenizer = directory.resolve(run.data.tokenizer) / TOKENIZER_JSON
    if not tokenizer.is_file():
        raise UserError(
            f"{tokenizer} does not exist; let data.tokenizer name the directory that made the"
            " tokens"
        )
    tokenizer_sha256 = sha256_of(tokenizer)
    for corpus in corpora:
        if corpus.manifest.tokenizer_sha256 != tokenizer_sha256:
            raise UserError(
                f"{corpus.prefix} was not made by {tokenizer}; prepare it again with that tokenizer"
            )


def _files(corpus: TokenSource) -> set[str]:
    """Return the path and, where recorded, the hash of every token file of a corpus."""
    return {text for file in corpus.files() for text in file if text}


def _check_unseen(corpus: TokenSource, held_out: TokenSource) -> None:
    """Raise UserError if a file, or a source, of the held-out text is trained on."""
    if shared := _files(corpus) & _files(held_out):
        raise UserError(
            f"{held_out.prefix} is trained on: {min(shared)} is a file of {corpus.prefix} too;"
            " hold out another file"
        )
    if not isinstance(corpus.manifest, Manifest) or not isinstance(held_out.manifest, Manifest):
        return
    shares = corpus.manifest.share, held_out.manifest.share
    if shares[0] and shares[1] and not shares[0].overlaps(shares[1]):
        return
    made_from = {record.sha256 for record in corpus.manifest.sources.values() if record.bytes}
    for name, record in held_out.manifest.sources.items():
        if record.sha256 in made_from or (
            name.startswith("dataset:") and name in corpus.manifest.sources
        ):
            raise UserError(
                f"{held_out.prefix} is trained on: {corpus.prefix} was made from {name} too; "
                "prepare the held-out text from other sources"
            )
