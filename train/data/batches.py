"""Batches as functions of seed and step, and the labels in them that count.

Both engines take a `Batch`, `train.run_data` makes those of a run. The order of sequences is in
`train.data.order`.

Shapes: B sequences, S tokens of a sequence.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from train.data.config import RepetitionFilter
from train.data.corpus import Corpus
from train.data.order import Order

# Matches found before a sequence is examined token by token: more of them spare more sequences.
PROBES = 4


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
        of_rank = rows.reshape(number, self.ranks, -1)[:, self.rank].reshape(-1)
        return np.where(of_rank < count, of_rank, -1)


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
        # Row -1 takes the last sequence here, and then none of its labels counts.
        counted_BS = self.counted_BS[rows] & (rows >= 0)[:, None]
        rows = rows.clamp(min=0)
        starts_BS = None if self.starts_BS is None else self.starts_BS[rows]
        return Batch(self.tokens_BS[rows], counted_BS, starts_BS)

    def split(self, size: int) -> list["Batch"]:
        """Return the sequences in pieces of `size`."""
        tokens, counted = self.tokens_BS.split(size), self.counted_BS.split(size)
        starts = [None] * len(tokens) if self.starts_BS is None else self.starts_BS.split(size)
        return [Batch(*piece) for piece in zip(tokens, counted, starts, strict=True)]

    def microbatches(self, size: int, device: torch.device) -> list["Batch"]:
        """Return the sequences in pieces of `size`, on the device."""
        tokens_BS = self.tokens_BS.to(device, non_blocking=True)
        counted_BS = self.counted_BS.to(device, non_blocking=True)
        return Batch(tokens_BS, counted_BS, self.starts_BS).split(size)

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


def _longest_run(matches_S: NDArray[np.bool_]) -> int:
    """Return the length of the longest stretch of True."""
    # Between two breaks, with one added at either end, lies a stretch of True.
    breaks = np.flatnonzero(~np.concatenate([[False], matches_S, [False]]))
    return int(np.diff(breaks).max()) - 1


def repetitive(tokens_BS: NDArray[np.int64], rule: RepetitionFilter) -> NDArray[np.bool_]:
    """Return whether each sequence holds an n-gram repeated in a row too often, bool [B].

    With period p, r consecutive tokens that equal the token p before them are floor(r / p) + 1
    repeats; a sequence is repetitive if that reaches `max_count` for some p in
    min_period..max_period. These are the sequences that allenai/OLMo masks (olmo/data/util.py,
    `find_periodic_sequences`; olmo/data/memmap_dataset.py, `_validate_instance`). It sees no fewer
    than three repeats: a `max_count` of 2 means 3 there and here.

    K = (max_count - 1) p matches in a row contain at least floor(K / g) multiples of g, one after
    the other. So only every g-th match is computed, and only a sequence with that many of them in a
    row is examined in full.

    Example: the tokens 1, 2 three times.
        >>> tokens_BS = np.array([[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6]])
        >>> repetitive(tokens_BS, RepetitionFilter(max_count=3)).tolist()
        [True, False]
    """
    repeats_B = np.zeros(len(tokens_BS), bool)
    length = tokens_BS.shape[1]
    for period in range(rule.min_period, rule.max_period + 1):
        needed = (max(rule.max_count, 3) - 1) * period
        if needed > length - period:
            break
        stride = max(1, needed // PROBES)
        # Every stride-th match, and where `in_a_row` of them follow each other.
        probed = tokens_BS[:, period::stride] == tokens_BS[:, : length - period : stride]
        in_a_row = min(PROBES, needed // stride)
        width = probed.shape[1] - in_a_row + 1
        together = probed[:, :width].copy()
        for shift in range(1, in_a_row):
            together &= probed[:, shift : shift + width]
        for row in np.flatnonzero(together.any(axis=1) & ~repeats_B).tolist():
            matches_S = tokens_BS[row, period:] == tokens_BS[row, :-period]
            repeats_B[row] = _longest_run(matches_S) >= needed
    return repeats_B
