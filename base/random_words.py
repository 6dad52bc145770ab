"""Random words from a counter-based hash: every word is a pure function of its place.

Neither the order of generation nor the sharding enters, so whoever draws a part of a stream, on
whatever rank, draws the same words.
"""

import hashlib

import torch
from torch import Tensor

BITS_PER_WORD = 64
MASK = (1 << BITS_PER_WORD) - 1


def _signed(value: int) -> int:
    """Return the int64 of the same 64 bits, which torch multiplies modulo 2^64."""
    value &= MASK
    return value - (1 << BITS_PER_WORD) if value >> (BITS_PER_WORD - 1) else value


# The increment and the multipliers of SplitMix64, see `words`.
GOLDEN = _signed(0x9E3779B97F4A7C15)
MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _xor_shift(words: Tensor, bits: int) -> Tensor:
    """Return the words xor their logical right shift. The >> of torch would carry the sign bit."""
    return words ^ ((words >> bits) & (MASK >> bits))


def words(key: str, start: int, stop: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Return words start..stop-1 of the stream a text names, int64 with 64 random bits each.

    Word i is output i + 1 of SplitMix64 (Steele, Lea, Flood 2014) in state BLAKE2b-64(text), little
    endian.

    Example: a word is a function of its place alone.
        >>> words("a stream", 0, 8)[5:].equal(words("a stream", 5, 8))
        True
    """
    places = torch.arange(start, stop, device=device)
    return _xor_shift(_mixed(places * GOLDEN + _first_state(key)), 31)


def upper_halves_at(key: str, *places: Tensor) -> Tensor:
    """Return the upper 32 bits of the words at sums of places, which broadcast, as int32.

    They are those of `words`, at two thirds of the memory traffic.

    Example: a matrix of 4 columns.
        >>> first_of_rows, columns = torch.tensor([[0], [4]]), torch.arange(4)
        >>> halves = upper_halves_at("a stream", first_of_rows, columns)
        >>> halves.flatten().equal((words("a stream", 0, 8) >> 32).int())
        True
    """
    first, *others = (place * GOLDEN for place in places)
    states = first + _first_state(key)
    for other in others:
        states = states + other
    # In memory the upper half comes second. Of it the last step changes one bit.
    upper = _mixed(states).view(torch.int32)[..., 1::2]
    return upper ^ ((upper >> 31) & 1)


def _first_state(key: str) -> int:
    """Return the state of the stream's first word."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
    return _signed(seed + GOLDEN)


def _mixed(states: Tensor) -> Tensor:
    """Return the words of states, but for their last step."""
    # A state is the first one plus an increment for each step: no word needs those before it.
    mixed = _xor_shift(states, 30) * MULTIPLIERS[0]
    return _xor_shift(mixed, 27) * MULTIPLIERS[1]
