"""Batches of a run as functions of seed and step, and the held-out sequences.

`open_data` checks the token files of a run; `RunData` reads them for the loop; both engines take a
`Batch`. The order of sequences is in `train.data.order`.

Shapes: B sequences, S tokens of a sequence.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from base.errors import UserError
from base.files import sha256_of
from train.data.config import RepetitionFilter
from train.data.corpus import Corpus, TokenSource, check_vocabulary, open_source
from train.data.manifest import Manifest, token_files
from train.data.order import Order
from train.data.repetition import repetitive
from train.data.tokenizer import TOKENIZER_JSON
from train.run.config import RunConfig
from train.run.directory import RunDirectory


class Replica(NamedTuple):
    """A data-parallel replica of the model, by which a batch is shared out."""

    rank: int
    ranks: int
    micro_batch_size: int

    def rows(self, count: int) -> NDArray[np.int64]:
        """Return its rows of a batch of `count`: of every `ranks` microbatches its own.

        Where the sequences do not suffice a row is -1.
        """
        number = -(-count // (self.micro_batch_size * self.ranks))
        rows = np.arange(number * self.micro_batch_size * self.ranks)
        own = rows.reshape(number, self.ranks, -1)[:, self.rank].reshape(-1)
        return np.where(own < count, own, -1)


class Batch(NamedTuple):
    """The sequences of one update, or of one held-out loss: all, or those of one replica."""

    tokens_BS: Tensor  # int64 [B, S + 1]: inputs are [:, :-1], labels [:, 1:]
    counted_BS: Tensor  # bool [B, S]: the labels that enter the loss
    # bool [B, S], on the CPU: inputs that begin a document, if attention stays inside documents.
    starts_BS: Tensor | None = None

    @staticmethod
    def of(tokens_BS: Tensor) -> "Batch":
        """Return a batch in which every label counts."""
        return Batch(tokens_BS, torch.ones_like(tokens_BS[:, 1:], dtype=torch.bool))

    def first(self, count: int) -> "Batch":
        """Return the first sequences."""
        starts_BS = None if self.starts_BS is None else self.starts_BS[:count]
        return Batch(self.tokens_BS[:count], self.counted_BS[:count], starts_BS)

    def of_replica(self, replica: Replica) -> "Batch":
        """Return the replica's rows of a whole batch.

        Where the sequences do not suffice the first is repeated, without a label that counts.
        """
        rows = torch.from_numpy(replica.rows(len(self.tokens_BS)))
        counted_BS = self.counted_BS[rows] & (rows >= 0)[:, None]
        rows = rows.clamp(min=0)
        starts_BS = None if self.starts_BS is None else self.starts_BS[rows]
        return Batch(self.tokens_BS[rows], counted_BS, starts_BS)

    def microbatches(self, size: int, device: torch.device) -> list["Batch"]:
        """Return the sequences in pieces of `size`, on the device."""
        tokens = self.tokens_BS.to(device, non_blocking=True).split(size)
        counted = self.counted_BS.to(device, non_blocking=True).split(size)
        starts = [None] * len(tokens) if self.starts_BS is None else self.starts_BS.split(size)
        return [Batch(*piece) for piece in zip(tokens, counted, starts, strict=True)]

    def pinned(self) -> "Batch":
        """Return the batch in memory that a GPU copies from while the host continues."""
        return Batch(self.tokens_BS.pin_memory(), self.counted_BS.pin_memory(), self.starts_BS)


def batch(
    corpus: Corpus, *, step: int, batch_size: int, sequence_length: int, seed: int
) -> NDArray[np.int64]:
    """Return the batch of update `step`, from 1, [B, S + 1], in the order 'permutation'."""
    order = Order("permutation", corpus.num_sequences(sequence_length), seed, batch_size)
    return corpus.sequences(
        order(np.arange((step - 1) * batch_size, step * batch_size)), sequence_length
    )


class RunData:
    """The data of one run: see `open_data`.

    Attributes:
        sha256: identity of the tokens: "train", "held_out" and, if there are more, "held_out.NAME".
    """

    def __init__(
        self,
        run: RunConfig,
        train: TokenSource,
        held_out: dict[str, TokenSource],
        order_directory: Path,
    ) -> None:
        self._run, self._train, self._held_out = run, train, held_out
        size = train.num_sequences(run.data.sequence_length)
        self._order = Order(run.data.order, size, run.seed, run.batch_size, order_directory)
        sources = {"train": train} | held_out
        self.sha256 = {use: source.manifest.sha256 for use, source in sources.items()}

    def batch(self, step: int, replica: Replica | None = None) -> Batch:
        """Return a replica's rows of the batch of update `step`, from 1; without one, all rows.

        UserError for an unknown token.
        """
        size = self._run.batch_size_at(step)
        rows_B = replica.rows(size) if replica else np.arange(size)
        indices_B = self._order(self._run.sequences_at(step - 1) + rows_B)
        return self._read(self._train, indices_B, self._run.data.repetition_filter)

    def held_out(self) -> dict[str, Batch]:
        """Return the first sequences of every held-out file, unfiltered, by the keys of `sha256`.

        "held_out" comes first.
        """
        indices_B = np.arange(self._run.data.held_out_sequences)
        return {use: self._read(source, indices_B, None) for use, source in self._held_out.items()}

    def _read(
        self, corpus: TokenSource, indices_B: NDArray[np.int64], rule: RepetitionFilter | None
    ) -> Batch:
        tokens_BS = corpus.sequences(indices_B, self._run.data.sequence_length)
        vocab_size = self._run.model.vocab_size
        if corpus.manifest.max_token_id is None and tokens_BS.max() >= vocab_size:
            raise UserError(
                f"a batch holds token {tokens_BS.max()}, outside the model's vocabulary of"
                f" {vocab_size}; correct the --dtype of 'train index', or raise model.vocab_size"
            )

        # Labels that enter the loss.
        counted_BS = np.ones((len(indices_B), self._run.data.sequence_length), bool)
        counted_BS[:, -1] = corpus.last_label_counts
        if rule:
            counted_BS[repetitive(tokens_BS[:, :-1], rule)] = False

        # A document begins after each end-of-text token, and at the start of the sequence.
        starts_BS = None
        if self._run.data.document_mask:
            starts_BS = torch.ones(counted_BS.shape, dtype=torch.bool)
            starts_BS[:, 1:] = torch.from_numpy(tokens_BS[:, :-2] == corpus.manifest.eos_token_id)
        return Batch(torch.from_numpy(tokens_BS), torch.from_numpy(counted_BS), starts_BS)


def open_data(run: RunConfig, directory: RunDirectory, *, verify_hashes: bool) -> RunData:
    """Open the data of a run, checked against the model and itself before anything is built.

    `verify_hashes` hashes files that are small enough for a start; one rank is enough.

    Raises:
        UserError: files missing, edited or too short, another tokenizer, tokens outside the
            vocabulary, or held-out sequences that are trained on.
    """
    train = open_source(directory.resolve(run.data.train), verify_hashes)
    files = {"held_out": run.data.held_out}
    files |= {f"held_out.{name}": file for name, file in run.data.more_held_out.items()}
    held_out = {
        use: open_source(directory.resolve(file), verify_hashes) for use, file in files.items()
    }
    for corpus in (train, *held_out.values()):
        check_vocabulary(corpus, run.model.vocab_size)
    _check_tokenizer(run, directory, (train, *held_out.values()))
    for source in held_out.values():
        _check_unseen(train, source)
        available = source.num_sequences(run.data.sequence_length)
        required = run.data.held_out_sequences
        if available < required:
            raise UserError(
                f"{source.prefix} holds {available} sequences, data.held_out_sequences asks for"
                f" {required}; prepare more held-out text or ask for fewer"
            )
    return RunData(run, train, held_out, directory.order)


def _check_tokenizer(
    run: RunConfig, directory: RunDirectory, corpora: tuple[TokenSource, ...]
) -> None:
    tokenizer = directory.resolve(run.data.tokenizer) / TOKENIZER_JSON
    if not tokenizer.is_file():
        raise UserError(f"{tokenizer} does not exist; let data.tokenizer name the directory")
    tokenizer_sha256 = sha256_of(tokenizer)
    for corpus in corpora:
        if corpus.manifest.tokenizer_sha256 != tokenizer_sha256:
            raise UserError(
                f"{corpus.prefix} was not made by {tokenizer}; prepare it again with that tokenizer"
            )


def _files(corpus: TokenSource) -> set[str]:
    """Return the real path and, where recorded, the hash of every token file of a corpus."""
    files = [
        (path, digest)
        for path, _, digest in token_files(corpus.prefix, corpus.manifest)
        if path.suffix != ".idx"  # documents of equal lengths have equal ones
    ]
    return {str(path.resolve()) for path, _ in files} | {digest for _, digest in files if digest}


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
    made_from = {record.digest for record in corpus.manifest.sources.values() if record.bytes}
    for name, record in held_out.manifest.sources.items():
        if record.digest in made_from or (
            name.startswith("dataset:") and name in corpus.manifest.sources
        ):
            raise UserError(
                f"{held_out.prefix} is trained on: {corpus.prefix} was made from {name} too; "
                "prepare the held-out text from other sources"
            )
