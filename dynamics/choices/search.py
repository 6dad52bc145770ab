"""The search for the average of a run's exports with the lowest loss.

Tried are every export, every LAWA window that ends at the last one (arXiv 2306.03241), every
average kept in training, and a greedy soup (arXiv 2203.05482, algorithm 1).
"""

from collections.abc import Callable, Sequence

Members = tuple[str, ...]  # models of an average, oldest first
Loss = Callable[[Members], float]


def most_tried(exports: int, kept: int) -> tuple[int, int]:
    """Return how many models `search` measures at most, and how many of them it has to average.

    Example: 4 exports and 1 kept average; 3 windows and 3 additions to a soup.
        >>> most_tried(exports=4, kept=1)
        (11, 6)
    """
    averages = max(0, exports - 1) + max(0, exports - 1)  # windows, and additions to the soup
    return exports + kept + averages, averages


def search(exports: Sequence[str], kept: Sequence[str], loss: Loss) -> dict[Members, float]:
    """Return the loss of every model that is tried; each is measured once.

    Args:
        exports: names of the weights, oldest first.
        kept: names of averages, no ingredients of others.
        loss: of the uniform mean of some members.

    Example: 2 for the mean of 1 and 3 is right, which neither b nor c alone is.
        >>> weight = {"a": 9.0, "b": 1.0, "c": 3.0}
        >>> loss = lambda members: abs(2 - sum(map(weight.get, members)) / len(members))
        >>> losses = search(["a", "b", "c"], [], loss)
        >>> min(losses, key=losses.get), len(losses)
        (('b', 'c'), 5)
    """
    losses: dict[Members, float] = {}

    def measured(members: Members) -> float:
        if members not in losses:
            losses[members] = loss(members)
        return losses[members]

    for name in (*exports, *kept):
        measured((name,))
    for window in range(2, len(exports) + 1):
        measured(tuple(exports[-window:]))
    _greedy_soup(exports, measured)
    return losses


def _greedy_soup(exports: Sequence[str], loss: Loss) -> Members:
    """Return the soup of exports, best first, less those that would raise its loss."""
    best, *others = sorted(exports, key=lambda name: loss((name,)))
    soup: Members = (best,)
    for name in others:
        wider = tuple(export for export in exports if export in (*soup, name))
        if loss(wider) <= loss(soup):
            soup = wider
    return soup
