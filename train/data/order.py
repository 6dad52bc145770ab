r"""The order of sequences, a function of seed, epoch and position alone.

Neither the world size nor the length of the run enters, so a cooldown sees the data of the run it
came from. Every epoch visits every sequence once, in an order of its own.

The order 'permutation' stores nothing: `permute` computes it by a Feistel network with cycle
walking. One round of the network takes the halves of a number, with h bits each:

        left          right
          |             |
         (^)<-- mix <---+       left ^ (mix(right + key of the round) & (2^h - 1))
          |             |
           \           /
             \       /
               swap
             /       \
        right         left ^ mix(right + key)

A round can be undone, whatever `mix` is: its output holds `right`, which gives mix(right + key)
again. So eight rounds are a bijection of all 4^h numbers (Luby and Rackoff 1988, 'How to construct
pseudorandom permutations from pseudorandom functions').

The number of sequences is seldom a power of 4. An image that is not below it goes through the
network again until one is, which is cycle walking (Black and Rogaway 2002, 'Ciphers with arbitrary
finite domains', section 3). For 10 sequences of 16 numbers, seed 0 and epoch 0:

    position 4:  4 -> 9                  is below 10: sequence 9
    position 5:  5 -> 15 -> 10 -> 7      15 and 10 are not: sequence 7
    position 9:  9 -> 12 -> 3            12 is not: sequence 3

Two positions never meet, as no two numbers have the same image. The walks together visit each of
the 4^h numbers at most once, and there are at most 4 times as many numbers as sequences: on average
a walk takes at most 4 steps.
"""

import os
import socket
from pathlib import Path
from typing import Literal, assert_never

import numpy as np
from numpy.typing import NDArray

from base.errors import UserError
from base.files import fsync_path, locked

Indices = NDArray[np.int64]
SHUFFLE_IN_MEMORY_BYTES = 64 << 20  # a larger one is in a file that all ranks map


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's finaliser (Steele et al. 2014): a fixed scrambling of 64-bit integers."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> Indices:
    """Apply a pseudo-random bijection of 0..size-1; nothing of length `size` is stored.

    A balanced Feistel network over the next even power of two, walked until the image falls below
    `size` (Black and Rogaway 2002, 'Ciphers with arbitrary finite domains').

    Args:
        positions: integers in 0..size-1, in any order.
        size: number of sequences.
        seed: of the run.
        epoch: has an order of its own.

    Returns:
        The image of each position.

    Example: any position alone has the image that it has among others.
        >>> permute(np.arange(10), size=10, seed=1, epoch=0).tolist()
        [5, 2, 9, 6, 3, 0, 1, 4, 8, 7]
        >>> permute(np.array([2]), size=10, seed=1, epoch=0).tolist()
        [9]
    """
    # Half of the bits of the largest position, rounded up: both halves have as many.
    half_bits = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    half_mask = np.uint64((1 << int(half_bits)) - 1)
    # Sums and products of the mixing wrap around at 64 bits on purpose.
    with np.errstate(over="ignore"):
        key = _mix(_mix(np.array([seed], np.uint64)) + np.uint64(epoch))
        keys = _mix(key + np.arange(1, 9, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))

        # Eight rounds map [0, 4^half_bits) to itself; an image outside [0, size) is mapped again.
        values = positions.astype(np.uint64)
        outside = np.ones(len(values), bool)
        while outside.any():
            left, right = values[outside] >> half_bits, values[outside] & half_mask
            for round_key in keys:
                left, right = right, left ^ (_mix(right + round_key) & half_mask)
            values[outside] = (left << half_bits) | right
            outside[outside] = values[outside] >= size
    return values.astype(np.int64)


class Order:
    """The sequence at each position, epoch after epoch.

    permutation: `permute`, nothing stored. sequential: the order of the file in every epoch.

    olmo: Ai2's own batches (allenai/OLMo, olmo/data/iterable_dataset.py). The numbers 0..size-1 are
    shuffled by NumPy's PCG64 seeded with seed + epoch; each epoch drops what does not fill a whole
    batch. OLMo cuts a rank's share first, to floor(size / ranks) and then to whole batches;
    floor(floor(n / a) / b) = floor(n / (a b)), so the number of ranks cancels. This order has to be
    stored, 4 bytes a sequence. Beyond SHUFFLE_IN_MEMORY_BYTES it is in a file of `directory`, see
    `_mapped`.
    """

    def __init__(
        self,
        kind: Literal["permutation", "olmo", "sequential"],
        size: int,
        seed: int,
        batch_size: int,
        directory: Path | None = None,
    ) -> None:
        self.kind, self.size, self.seed, self._directory = kind, size, seed, directory
        self.epoch_size = size // batch_size * batch_size if kind == "olmo" else size
        if self.epoch_size == 0:
            raise UserError(f"all {size} sequences fill no batch of {batch_size}; add data")
        if kind == "olmo" and size >= np.iinfo(np.uint32).max:
            raise UserError(f"order 'olmo' takes no {size} sequences; use 'permutation'")
        self._shuffled: tuple[int, NDArray[np.uint32]] | None = None

    def __call__(self, positions_B: Indices) -> Indices:
        """Return sequence numbers, int64 [B], at positions counted from the start of training.

        Example: two epochs of OLMo's order of 5 sequences, each of two whole batches of 2.
            >>> Order("olmo", size=5, seed=0, batch_size=2)(np.arange(8)).tolist()
            [2, 4, 3, 0, 4, 0, 1, 2]
        """
        epochs = positions_B // self.epoch_size
        indices = positions_B % self.epoch_size
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            indices[inside] = self._epoch(indices[inside], epoch)
        return indices

    def _epoch(self, positions: Indices, epoch: int) -> Indices:
        match self.kind:
            case "sequential":
                return positions
            case "permutation":
                return permute(positions, self.size, self.seed, epoch)
            case "olmo":
                if self._shuffled is None or self._shuffled[0] != epoch:
                    self._shuffled = (epoch, self._shuffle(self.seed + epoch))
                return self._shuffled[1][positions].astype(np.int64)
            case _:
                assert_never(self.kind)

    def _shuffle(self, seed: int) -> NDArray[np.uint32]:
        in_memory = self.size * np.dtype(np.uint32).itemsize <= SHUFFLE_IN_MEMORY_BYTES
        if self._directory is None or in_memory:
            return _shuffled(self.size, seed)
        return _mapped(self._directory, self.size, seed)


def _shuffled(size: int, seed: int) -> NDArray[np.uint32]:
    """Return the numbers 0..size-1 as NumPy's PCG64 shuffles them: one number after the other."""
    numbers = np.arange(size, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed)).shuffle(numbers)
    return numbers


def _mapped(directory: Path, size: int, seed: int) -> NDArray[np.uint32]:
    """Return the shuffled numbers from a file that every rank, and every later attempt, maps.

    The first rank writes it, which takes 4 bytes of memory and some 50 ns for each number; the
    others wait for its lock. A step reads only the few pages that hold its positions.
    """
    path = directory / f"olmo-{size}-{seed}.u32"
    with locked(directory / ".lock"):
        if not path.exists() or path.stat().st_size != size * np.dtype(np.uint32).itemsize:
            # On some file systems the lock excludes ranks of the same node only. The file of a
            # killed rank is written again.
            unfinished = directory / f".{path.name}.{socket.gethostname()}"
            _shuffled(size, seed).tofile(unfinished)
            fsync_path(unfinished)
            os.replace(unfinished, path)
    return np.memmap(path, np.uint32, "r").view(np.ndarray)
