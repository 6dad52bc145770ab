"""The description of a checkpoint, an HF directory or a run as text."""

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

BLOCKS = ("tensors", "files", "parts", "made_by", "damage", "warnings")  # shown below the rest, each its own way
WIDE = 10_000  # columns: a key is never broken or cut, wherever the text goes


def print_description(description: dict[str, Any]) -> None:
    """Writes what `inspection.describe` returned to stdout."""
    console = Console(highlight=False, markup=False, emoji=False, width=WIDE)
    _print(console, description["path"], [])
    facts = {key: value for key, value in description.items() if key not in (*BLOCKS, "path")}
    _print(console, "", [[key, shown] for key, shown in _leaves(facts)])
    for group, held in description.get("tensors", {}).items():
        title = f"{group}: {held['keys']:,} keys, {held['numbers']:,} numbers, {held['bytes']:,} bytes"
        stored = held.get("stored", {}).items()
        _print(console, title, [[key, _shape(one["shape"]), one["dtype"]] for key, one in stored])
    files = description.get("files", {})
    _print(console, "files", [[name, f"{file['bytes']:,}", file["state"]] for name, file in files.items()])
    parts = [[name, *(_shown(value) for value in part.values())] for name, part in description.get("parts", {}).items()]
    header = ["", "step", "tokens", "learning rate", "train loss", "held-out loss", "bytes", ""]
    _print(console, "checkpoints and exports", [header, *parts] if parts else [])
    _print(console, "made by", [[key, shown] for key, shown in _leaves(description["made_by"])])
    _print(console, "warnings", [[line] for line in description["warnings"]])
    _print(console, "DAMAGED", [[line] for line in description["damage"]])


def _print(console: Console, title: str, rows: list[list[str]]) -> None:
    """A title and the rows below it, aligned; nothing for a block without rows, unless the title says it all."""
    if title and (rows or ":" in title or "/" in title):
        console.print(Text(title, style="bold red" if title == "DAMAGED" else "bold"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.print(Text(f"   {line.rstrip()}", style="red" if "DAMAGED" in line else ""))


def _leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every value of nested objects by its dotted key."""
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _leaves(inner, f"{prefix}{key}.")
        elif isinstance(inner, list) and any(isinstance(each, dict) for each in inner):
            yield from _leaves({str(number): each for number, each in enumerate(inner, 1)}, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _shown(inner)


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else "-" if value is None else json.dumps(value)


def _shape(shape: list[int] | None) -> str:
    return "-" if shape is None else str(shape)
