"""JSONL files of a submission, whose lines several processes add: one may be cut off by its end."""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from base.errors import UserError
from base.reading import as_model, parse_json, read_regular


def append_line(path: Path, content: dict[str, Any]) -> None:
    """Add a line to a JSONL file, synced, after one that was cut off if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        whole = file.tell() == 0
        if not whole:
            file.seek(-1, os.SEEK_END)
            whole = file.read() == b"\n"
        file.write(b"" if whole else b"\n")
        file.write(json.dumps(content).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines[Line](kind: type[Line] | TypeAdapter[Line], path: Path) -> list[Line]:
    """Return the lines of a JSONL file, but for those that were cut off; empty without a file.

    A line that was cut off has a beginning and lacks its end. UserError names any other that is
    not of the kind: it was whole and is damaged.
    """
    try:
        lines = read_regular(path).split(b"\n")
    except FileNotFoundError:
        return []
    return [
        _line(kind, line, path, number)
        for number, line in enumerate(lines, 1)
        if line and not _is_cut_off(line)
    ]


def _is_cut_off(line: bytes) -> bool:
    """Return whether a line is the beginning of one of ours, which are printable ASCII."""
    is_ours = line.isascii() and line.decode("ascii").isprintable()
    return is_ours and line.startswith(b"{") and not line.endswith(b"}")


def _line[Line](kind: type[Line] | TypeAdapter[Line], line: bytes, path: Path, number: int) -> Line:
    place = f"{path}, line {number}"
    return as_model(kind, parse_json(line, place, "correct that line"), place)


def damaged(path: Path, problem: str) -> UserError:
    """Return the error of a file whose lines do not go together."""
    return UserError(f"{path} is damaged ({problem}); restore it")
