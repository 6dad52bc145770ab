"""Records that tests write, or change so that their seals must not give it away."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from base.digests import SEAL, sealed
from train.run.directory import RunDirectory
from train.run.status import Ending, Status, write_status


def reseal(path: Path, content: dict[str, Any]) -> None:
    """Writes a record with these values, sealed anew; NaN too, which no command writes."""
    values = {key: value for key, value in content.items() if key != SEAL}
    path.write_text(json.dumps(sealed(values), indent=2) + "\n")


@contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    """The values of a record, for a test to change; it is sealed anew."""
    content = json.loads(path.read_text())
    yield content
    reseal(path, content)


def measured_in(path: Path) -> Any:
    """The figures of a result, by its file or its directory."""
    return json.loads((path / "result.json" if path.is_dir() else path).read_text())["measured"]


def json_lines(rows: list[dict[str, Any]]) -> str:
    """The lines of metrics.jsonl with these rows."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_ending(directory: RunDirectory, ending: Ending, step: int = 5, **fields: Any) -> None:
    """The status.json of an attempt that ended so."""
    values: dict[str, Any] = {"attempt": 1, "fingerprint": "0" * 16, "reason": "", "time": 0.0}
    write_status(directory, Status(status=ending, step=step, **(values | fields)))


def flip_digit(path: Path, key: str) -> None:
    """Changes the first number that follows `"key":` in a JSON file, nothing else."""
    text = path.read_text()
    number = re.search(rf'"{key}": *(-?[0-9][0-9.e+-]*)', text)
    assert number
    changed = repr(2 * json.loads(number[1]) + 1)
    path.write_text(text[: number.start(1)] + changed + text[number.end(1) :])
