"""Rademacher probes from a counter-based hash: every sign is a pure function of where it stands.

Neither the order of generation nor the sharding nor the model's values enter, so all checkpoints of a study meet the
same probes and differences between them keep only their own noise.
"""

import hashlib

import torch
from torch import Tensor

BITS_PER_WORD = 64
MASK = (1 << BITS_PER_WORD) - 1


def _signed(value: int) -> int:
    """The int64 of the same 64 bits: torch multiplies int64 modulo 2^64, which is all the hash needs."""
    value &= MASK
    return value - (1 << BITS_PER_WORD) if value >> (BITS_PER_WORD - 1) else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _xor_shift(words: Tensor, bits: int) -> Tensor:
    """The words xor their logical right shift; torch's own >> would carry the sign bit."""
    return words ^ ((words >> bits) & (MASK >> bits))


def _splitmix64(key: int, counters: Tensor) -> Tensor:
    """Outputs number `counters` of the SplitMix64 generator in state `key` (Steele, Lea, Flood 2014), as int64."""
    words = counters * GOLDEN + _signed(key)
    words = _xor_shift(words, 30) * MULTIPLIERS[0]
    words = _xor_shift(words, 27) * MULTIPLIERS[1]
    return _xor_shift(words, 31)


def rademacher(
    name: str, start: int, stop: int, *, seed: int, probe: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Entries start..stop-1 of the probe of one parameter, each +1 or -1, int64.

    The key is BLAKE2b-64 of the text 'seed/probe/name' (little endian); entry i, counted over the whole flattened
    parameter, is bit i mod 64 of output i // 64 + 1 of SplitMix64 in that state: 1 gives +1, 0 gives -1.
    """
    digest = hashlib.blake2b(f"{seed}/{probe}/{name}".encode(), digest_size=8).digest()
    first, last = start // BITS_PER_WORD, -(-stop // BITS_PER_WORD)
    words = _splitmix64(int.from_bytes(digest, "little"), torch.arange(first + 1, last + 1, device=device))
    bits = (words[:, None] >> torch.arange(BITS_PER_WORD, device=device)) & 1
    offset = first * BITS_PER_WORD
    return bits.flatten()[start - offset : stop - offset] * 2 - 1
