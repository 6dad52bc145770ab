"""The tables of a report as CSV and LaTeX files."""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from base.files import replaced_file
from study.report.cells import FURTHER, MISSING, Cell, Table

DIRECTORY = "tables"
ESCAPED = {character: f"\\{character}" for character in "&%$#_{}"}
ESCAPED |= {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}"}


def write_tables(directory: Path, tables: Sequence[Table]) -> None:
    """Write STUDY/tables/NAME.csv and NAME.tex of each table."""
    folder = directory / DIRECTORY
    folder.mkdir(exist_ok=True)
    for table in tables:
        path = folder / f"{table.name}.csv"
        with replaced_file(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(csv_rows(table))
        with replaced_file(path.with_suffix(".tex")) as aside:
            aside.write_text(latex(table), encoding="utf-8")


def csv_rows(table: Table) -> Iterator[list[str | float]]:
    """Yield head and lines: a column per value, for each end of its interval, and for its p.

    Values have all their digits and no unit, which is in the head. What is not measured is empty.
    """
    by_column = list(zip(*table.body, strict=True)) or [()] * len(table.head)
    widths = [max((len(cell.numbers) for cell in cells), default=0) for cells in by_column]
    units = [next((cell.unit for cell in cells if cell.unit), "") for cells in by_column]

    head: list[str | float] = []
    for title, unit, width in zip(table.columns, units, widths, strict=True):
        name = f"{title}, {unit}" if unit else title
        head += [name, *(f"{name}, {other}" for other in FURTHER[: max(width - 1, 0)])]
    yield head
    for line in table.body:
        yield [
            part for cell, width in zip(line, widths, strict=True) for part in _parts(cell, width)
        ]


def _parts(cell: Cell, width: int) -> list[str | float]:
    """Return the numbers of a cell, or its words, in so many columns."""
    words = "" if cell.text == MISSING else cell.text
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
