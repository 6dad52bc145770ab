"""A schedule as a table: CSV with the tokens and learning rates of steps."""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from base.errors import UserError
from ckpt_tools.released.revisions import Revision

COLUMNS = ("step", "tokens", "learning_rate")
Known = dict[int, dict[str, float | None]]  # by step


def with_table(revisions: Sequence[Revision], path: Path) -> list[Revision]:
    """Return revisions with the tokens and learning rates that a table has for their steps.

    Raises:
        UserError: the table is no CSV with these columns, a value is no number of its kind, or it
            has none of the steps.
    """
    known = _read(path)
    if not any(revision.step in known for revision in revisions):
        raise UserError(f"{path} has none of the steps of the revisions; correct its column step")
    source = f"schedule of {path.name}"
    return [
        revision.model_copy(update=known[revision.step] | {"schedule": source})
        if revision.step in known
        else revision
        for revision in revisions
    ]


def _read(path: Path) -> Known:
    """Return tokens and learning rate by step; None where a cell is empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte-order mark is read over
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; correct the table's name") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8; save it as CSV in UTF-8") from None
    rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
    columns = rows.fieldnames or []
    # Of two columns of one name the last alone would be read.
    if not {"step"} < set(columns) <= set(COLUMNS) or len(set(columns)) < len(columns):
        raise UserError(
            f"{path} has the columns {', '.join(map(str, columns)) or 'none'}; give step, and"
            " tokens, learning_rate or both, each once"
        )
    known: Known = {}
    for row in _rows(rows, path):
        line = f"line {rows.line_num} of {path}"
        step = _number(line, "step", row["step"])
        if step is None or None in row or step in known:
            raise UserError(f"{line} has no step of its own, or too many values; correct it")
        known[int(step)] = {
            column: _number(line, column, row[column]) for column in columns if column != "step"
        }
    return known


def _rows(rows: "csv.DictReader[str]", path: Path) -> Iterator[dict[str, str]]:
    try:
        yield from rows
    except csv.Error as error:
        raise UserError(f"line {rows.line_num} of {path} is no CSV ({error}); correct it") from None


def _number(line: str, column: str, text: str | None) -> float | None:
    """Return a number, an integer but for learning rates; None for an empty cell."""
    text = (text or "").strip()
    if not text:
        return None
    # Learning rates alone have fractions; steps and tokens are counted.
    if column == "learning_rate":
        value = _float(text)
        if value is not None and math.isfinite(value) and value >= 0:
            return value
        raise UserError(f"{line}: {column} is {text[:40]!r}; give a number of at least 0")
    if re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        return int(text)
    raise UserError(f"{line}: {column} is {text[:40]!r}; give a whole number, digits alone")


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
