"""The documents that losses are measured on, drawn from a token file.

Shapes: D documents.
"""

import numpy as np
from numpy.typing import NDArray

from base.errors import UserError
from base.statistics import LEAST_DOCUMENTS
from train.data.corpus import Corpus


def draw_documents(corpus: Corpus, max_tokens: int | None, seed: int) -> NDArray[np.int64]:
    """Return the documents drawn until their targets number at least `max_tokens`, in file order.

    Each gets 64 random bits, and they are taken in the order of those. Document d gets output d of
    Philox, a counter-based generator, so documents added to the file move none before another.
    """
    targets_D = np.maximum(corpus.lengths_D.astype(np.int64) - 1, 0)
    if max_tokens is None:
        return np.arange(len(targets_D))
    order_D = np.argsort(np.random.Philox(seed).random_raw(len(targets_D)), kind="stable")
    # The first document that reaches the sum is taken too, whole.
    count = int(np.searchsorted(np.cumsum(targets_D[order_D]), max_tokens)) + 1
    return np.sort(order_D[:count])


def check_documents(corpus: Corpus, count: int) -> None:
    """Raise UserError where so many documents, or blocks, give no interval that holds."""
    if count < LEAST_DOCUMENTS:
        raise UserError(
            f"{corpus.prefix}: {count} evaluated documents or blocks give no interval that holds, "
            f"{LEAST_DOCUMENTS} do; raise --eval-tokens (of a study: eval_tokens and block_tokens),"
            " or prepare more or shorter documents (--document-tokens)"
        )
