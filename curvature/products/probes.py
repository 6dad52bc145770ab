"""Random signs from a counter-based hash: every sign is a pure function of its place.

Neither the order of generation nor the sharding nor the model's values enter, so all checkpoints of
a study meet the same probes and differences between them keep only their own noise.
"""

import torch
from torch import Tensor

from base.random_words import BITS_PER_WORD, words

# What is made at once does not grow with the parameter: on a CPU 1 MB of signs, which stays in its
# cache; on a GPU, which waits for every launch, 67 million signs. A probe of 7 billion parameters
# takes 8,700 launches.
WORDS_PER_CHUNK = {"cpu": 1 << 12, "cuda": 1 << 20}


def rademacher(
    name: str,
    start: int,
    stop: int,
    *,
    seed: int,
    probe: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Return entries start..stop-1 of the probe of one parameter, each +1 or -1.

    Entry i, counted over the whole flattened parameter, is bit i mod 64 of word i // 64 of the
    stream 'seed/probe/name': 1 gives +1, 0 gives -1.

    Example:
        >>> rademacher("weight", 0, 8, seed=0, probe=0)[2:5].equal(
        ...     rademacher("weight", 2, 5, seed=0, probe=0)
        ... )
        True
    """
    signs = torch.empty(stop - start, dtype=dtype, device=device)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    first, last = start // BITS_PER_WORD, -(-stop // BITS_PER_WORD)
    per_chunk = WORDS_PER_CHUNK[signs.device.type]
    for word in range(first, last, per_chunk):
        chunk = words(f"{seed}/{probe}/{name}", word, min(word + per_chunk, last), device=device)
        # Little endian: the low byte first. A table of the signs of every byte takes a CPU two
        # thirds of the time, but gathering from it was a quarter of a Hessian product on an H100.
        bits = (chunk.view(torch.uint8)[:, None] >> places) & 1
        drawn = bits.flatten().view(torch.int8).mul_(2).sub_(1)
        # A chunk is of whole words, which at the ends may reach beyond start and stop.
        offset = word * BITS_PER_WORD
        low, high = max(start, offset), min(stop, offset + len(drawn))
        signs[low - start : high - start] = drawn[low - offset : high - offset]
    return signs
