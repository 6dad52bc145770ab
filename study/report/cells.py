"""Tables of the report as data: cells with their numbers, which templates and files render."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quant_eval.estimate import Estimate
from study.results.table import Row

MISSING = "not measured"
FURTHER = ("low", "high", "p")  # of a value: the ends of its interval, and its p-value


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        text: the value as it is shown, with its unit.
        interval: shown below it; empty for none.
        shade: opacity of the ground.
        numbers: the value, and what it has of `FURTHER`; empty for words.
        unit: of the numbers; empty where the head of the column says it.
    """

    text: str
    interval: str = ""
    shade: float = 0.0
    numbers: tuple[float, ...] = ()
    unit: str = ""


class Table(NamedTuple):
    """A table with its title and note; `groups` are heads over several columns."""

    title: str
    note: str
    head: Sequence[str]
    body: Sequence[Sequence[Cell]]
    groups: Sequence[tuple[str, int]] = ()

    @property
    def name(self) -> str:
        """The name of its files."""
        return re.sub("[^a-z0-9]+", "_", self.title.lower()).strip("_")

    @property
    def columns(self) -> list[str]:
        """The head of every column, with that of its group."""
        groups = [text for text, count in self.groups for _ in range(count)] or [""] * len(
            self.head
        )
        return [
            f"{group}: {text}" if group else text
            for group, text in zip(groups, self.head, strict=True)
        ]


class Bounded(NamedTuple):
    """A value with the ends of its interval."""

    value: float
    low: float
    high: float


def bounded(row: Row | None, column: str) -> Bounded | None:
    """Return a column of a row with the interval beside it; None where it is not measured."""
    if row is None or row[column] is None:
        return None
    return Bounded(row[column], row[f"{column}_low"], row[f"{column}_high"])


def of_estimate(estimate: Estimate) -> Bounded:
    """Return the value of an estimate with its interval."""
    return Bounded(estimate.value, *estimate.interval())


def all_bounded(rows: Iterable[Row | None], column: str) -> list[Bounded]:
    """Return the values of a column that are measured."""
    return [value for row in rows if (value := bounded(row, column))]


def cell(value: Bounded | None, digits: int, scale: float = 1.0, unit: str = "") -> Cell:
    """Return the cell of a value in decimals, times `scale`."""
    if value is None:
        return Cell(MISSING)
    numbers = tuple(scale * end for end in value)
    # z: what is rounded to zero has no sign
    text, low, high = (f"{number:z.{digits}f}" for number in numbers)
    shown_unit = f" {unit}" if unit else ""
    return Cell(f"{text}{shown_unit}", f"[{low}, {high}]", numbers=numbers, unit=unit)


def number(value: float, form: str) -> Cell:
    """Return the cell of a number without an interval."""
    return Cell(f"{value:{form}}", numbers=(value,))


def percent_digits(values: Iterable[Bounded | None]) -> int:
    """Decimals at which the largest of these shares has three figures in per cent; two at least."""
    largest = max((abs(each.value) for each in values if each), default=1.0)
    return max(2, 1 - math.ceil(math.log10(largest))) if largest > 0 else 2


def digits_of_smallest(values: Iterable[Bounded | None]) -> int:
    """Decimals at which the smallest of these values has three figures; four at least."""
    above = [each.value for each in values if each and each.value > 0]
    return max(4, 2 - math.floor(math.log10(min(above, default=1.0))))


def digits_of_errors(values: Iterable[Bounded | None], scale: float) -> int:
    """Decimals at which the shortest of these intervals has two figures or more."""
    widths = [each.high - each.low for each in values if each and each.high > each.low]
    return max(0, 1 - math.floor(math.log10(scale * min(widths, default=1.0))))
