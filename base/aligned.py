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


def shortened(lines: Sequence[str], most: int, rest: str = "--all prints them") -> list[str]:
    """Return at most so many lines: of more, those at both ends and the number between.

    >>> shortened(["a", "b", "c", "d", "e", "f"], 4)
    ['a', 'b', '... 3 more, --all prints them', 'f']
    """
    if len(lines) <= most:
        return list(lines)
    head, tail = most // 2, most - most // 2 - 1
    more = len(lines) - head - tail
    return [*lines[:head], f"... {more} more, {rest}", *lines[len(lines) - tail :]]
