"""Tables and paragraphs as lines of text for a terminal."""

import textwrap
from collections.abc import Collection, Iterable, Sequence

WIDTH = 100


def wrapped(text: str) -> list[str]:
    """Return a paragraph as lines, the others indented below the first.

    No word is broken, so that paths and names can be copied.
    """
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=" " * (len(text) - len(text.lstrip()) + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def aligned(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows as lines with columns of equal width, those of `right` to the right.

    >>> aligned([("run", "steps"), ("a", "80"), ("long", "1,000")], right={1})
    ['run   steps', 'a        80', 'long  1,000']
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def cell(column: int, text: str) -> str:
        return text.rjust(widths[column]) if column in right else text.ljust(widths[column])

    return ["  ".join(cell(*each) for each in enumerate(row)).rstrip() for row in rows]
