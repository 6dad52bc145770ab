"""Tables of the report as data, and as CSV and LaTeX files."""

import csv
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from base.files import replaced_file
from base.quantities import rounded, with_interval
from quant_eval.estimate import Estimate
from study.results.table import Row

MISSING = "not measured"
FURTHER = ("low", "high", "p")  # of a value: the ends of its interval, and its p-value


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        text: the value as it is shown, in the unit that the head of the column has.
        interval: shown below it; empty for none.
        shade: opacity of the ground.
        numbers: the value, and what it has of `FURTHER`; empty for words.
    """

    text: str
    interval: str = ""
    shade: float = 0.0
    numbers: tuple[float, ...] = ()


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
    def is_shaded(self) -> bool:
        """Some cell has a ground."""
        return any(cell.shade for line in self.body for cell in line)

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


def cell(value: Bounded | None, scale: float = 1.0, digits: int | None = None) -> Cell:
    """Return the cell of a value times `scale`: in decimals, or as many as its interval allows."""
    if value is None:
        return Cell(MISSING)
    numbers = tuple(scale * end for end in value)
    if digits is None:
        text, _, interval = with_interval(*value, scale).partition(" ")
        return Cell(text, interval, numbers=numbers)
    text, low, high = (rounded(number, -digits) for number in numbers)
    return Cell(text, f"[{low}, {high}]", numbers=numbers)


def number(value: float, form: str) -> Cell:
    """Return the cell of a number without an interval."""
    return Cell(f"{value:{form}}", numbers=(value,))


DIRECTORY = "tables"
ESCAPED = {character: f"\\{character}" for character in "&%$#_{}"}
ESCAPED |= {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}


def write_tables(directory: Path, tables: Sequence[Table], part: str = "") -> None:
    """Write STUDY/tables/NAME.csv and NAME.tex of each table; of a part in a folder of its name."""
    folder = directory / DIRECTORY / part
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        path = folder / f"{table.name}.csv"
        with replaced_file(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(csv_rows(table))
        with replaced_file(path.with_suffix(".tex")) as aside:
            aside.write_text(latex(table), encoding="utf-8")


def csv_rows(table: Table) -> Iterator[list[str | float]]:
    """Yield head and lines: a column per value, for each end of its interval, and for its p.

    Values have all their digits. What is not measured is empty.
    """
    by_column = list(zip(*table.body, strict=True)) or [()] * len(table.head)
    widths = [max((len(cell.numbers) for cell in cells), default=0) for cells in by_column]

    head: list[str | float] = []
    for name, width in zip(table.columns, widths, strict=True):
        head += [name, *(f"{name}, {other}" for other in FURTHER[: max(width - 1, 0)])]
    yield head
    for line in table.body:
        yield [
            part for cell, width in zip(line, widths, strict=True) for part in _parts(cell, width)
        ]


def _parts(cell: Cell, width: int) -> list[str | float]:
    """Return the numbers of a cell, or its words, in so many columns."""
    words = "" if cell.text == MISSING else cell.text
    # Shorter cells are padded, so that every line has the columns of the head.
    parts: list[str | float] = [*cell.numbers] if cell.numbers else [words]
    return parts + [""] * (max(width, 1) - len(parts))


def _texts(line: Sequence[Cell]) -> list[str]:
    return [f"{cell.text} {cell.interval}".strip() for cell in line]


def latex(table: Table) -> str:
    """Return the table as a LaTeX tabular that needs no package."""
    lines = [rf"% {table.title}", rf"\begin{{tabular}}{{{'l' * len(table.head)}}}", r"\hline"]
    lines += [_line(table.columns), r"\hline", *(_line(_texts(line)) for line in table.body)]
    return "\n".join([*lines, r"\hline", r"\end{tabular}", ""])


def _line(texts: Sequence[str]) -> str:
    escaped = ("".join(ESCAPED.get(character, character) for character in text) for text in texts)
    # braces keep a bracketed interval from being read as an option of the line before
    return " & ".join(f"{{{text}}}" for text in escaped) + r" \\"
