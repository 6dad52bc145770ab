"""The tables of a report as CSV and LaTeX files."""

import csv
from collections.abc import Sequence
from pathlib import Path

from base.files import replaced_file
from study.report.tables import Cell, Table

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
            csv.writer(file, lineterminator="\n").writerows(
                [table.columns, *map(_texts, table.body)]
            )
        with replaced_file(path.with_suffix(".tex")) as aside:
            aside.write_text(latex(table), encoding="utf-8")


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
