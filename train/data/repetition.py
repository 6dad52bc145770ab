"""OLMo's instance filter, against sequences in which a short n-gram repeats too often.

Shapes: B sequences, S tokens.
"""

import numpy as np
from numpy.typing import NDArray

from train.data.config import RepetitionFilter

# Matches found before a sequence is examined token by token: more of them spare more sequences.
PROBES = 4


def _longest_run(matches_S: NDArray[np.bool_]) -> int:
    """Return the length of the longest stretch of True."""
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
