"""metrics.jsonl, the truth about a run. MLflow is a mirror of it."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.files import naming
from base.reading import parse_json

TRAINED = "learning_rate"  # every row of an update has it, of a skipped one as well
HELD_OUT_LOSS = "held_out_loss"  # then .NAME of a further file, and /AVERAGE
QUANTIZATION = "quantization"  # begins the figures of a probe: /SPEC/..., see `train.rounding`
ROW_KEYS = {"step", "tokens", "attempt", "time"}  # of every row; all other keys are figures
LARGEST_COUNT = (1 << 63) - 1  # that MLflow's store holds
FIGURES = (  # that are read of single rows, of ranks.jsonl as well
    *("time", "tokens", "attempt", "loss", "tokens_per_second", "save_stall_seconds"),
    *("rank", "product_seconds", "busy_seconds_p50"),
)


class MetricsWriter:
    """Appends rows to metrics.jsonl, one JSON object a line, flushed at once. Rank 0 owns it."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path, self._attempt = path, attempt
        if path.exists():  # a killed attempt may have left half a line
            with naming(path):
                os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = path.open("a")

    def append(self, step: int, tokens: int, **values: float) -> None:
        """Append one row: step and tokens seen, then the named values."""
        row = {"step": step, "tokens": tokens, "attempt": self._attempt, "time": time.time()}
        row |= values
        line = json.dumps(row, allow_nan=False) + "\n"
        with naming(self._path):
            self._file.write(line)
            self._file.flush()

    def sync(self) -> None:
        """Sync the rows to the disk, before a checkpoint that they belong to."""
        with naming(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close the file."""
        self.sync()
        with naming(self._path):
            self._file.close()


def surviving_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows in the order of the file, each figure of a step once, no torn last line.

    Of a step that several attempts trained only the last attempt's values count, whatever the order
    of the lines: an orphan of an earlier attempt may have written after it.
    """
    rows: list[dict[str, Any]] = []
    places: dict[int, list[tuple[int, int]]] = {}  # by step: attempt and index of its rows
    try:
        text = path.read_text() if path.exists() else ""
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text; restore it or train the run again") from None
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        if line.endswith("\n"):
            try:
                row = _checked(json.loads(line))
                places.setdefault(row["step"], []).append((row["attempt"], len(rows)))
                rows.append(row)
            except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
                raise UserError(
                    f"line {number} of {path} is not a row of metrics ('{line[:60].strip()}');"
                    " correct that line"
                ) from None
    for of_step in places.values():
        if len(of_step) > 1:
            _strip(rows, of_step)
    return [row for row in rows if row.keys() - ROW_KEYS]


def _checked(row: Any) -> dict[str, Any]:
    """Return a row; KeyError, TypeError or AttributeError for what none of ours can hold.

    Figures may be NaN or infinite: who edits a file by hand may say so.
    """
    is_row = (
        all(type(row[key]) is int for key in ("step", "tokens", "attempt"))
        and all(type(value) in (int, float) for value in row.values())
        and all(abs(value) <= LARGEST_COUNT for value in row.values() if type(value) is int)
        and math.isfinite(row["time"])
    )
    if not is_row:
        raise TypeError
    return dict(row)


def _strip(rows: list[dict[str, Any]], of_step: list[tuple[int, int]]) -> None:
    """Remove from the rows of a step each figure that a later attempt or line has written again."""
    # An attempt that trained the step again makes all figures of earlier attempts stale.
    trained = max((attempt for attempt, index in of_step if TRAINED in rows[index]), default=0)
    later_keys: set[str] = set()
    # The latest first: by attempt, and within one by line.
    for attempt, index in sorted(of_step, reverse=True):
        keys = rows[index].keys() - later_keys - ROW_KEYS if attempt >= trained else set()
        later_keys |= keys
        rows[index] = {
            key: value for key, value in rows[index].items() if key in ROW_KEYS or key in keys
        }


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return one row per step, rising, made of its `surviving_rows`."""
    merged: dict[int, dict[str, Any]] = {}
    for row in sorted(surviving_rows(path), key=lambda row: (row["step"], row["attempt"])):
        merged.setdefault(row["step"], {}).update(row)
    return list(merged.values())


def tail_rows(path: Path, size: int, end: int | None = None) -> list[dict[str, Any]]:
    """Return the rows in the last `size` bytes of a JSONL file, without damaged lines.

    What begins before those bytes, or is being written, is left out. With `end`, the bytes are the
    last ones before that byte, at which a line begins.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END) if end is None else end
            start = max(0, end - size)
            # One byte earlier: where that is a line end, the first row of the tail is kept whole.
            before = max(0, start - 1)
            file.seek(before)
            lines = file.read(end - before).split(b"\n")
    except FileNotFoundError:
        return []
    # The last part is what comes after the last line end: a row that is being written.
    rows = (as_row(line, path) for line in lines[1 if start else 0 : -1])
    return [row for row in rows if row is not None]


def as_row(line: bytes, path: Path) -> dict[str, Any] | None:
    """Return a line that holds a step, and numbers where it holds figures; None for any other."""
    try:
        row = parse_json(line, path)
    except UserError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    is_row = all(type(row[key]) in (int, float) for key in FIGURES if key in row)
    return row if is_row else None
