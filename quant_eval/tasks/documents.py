"""Documents of tasks from local JSON Lines files, alike in their fields."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

from base.errors import UserError


def read_documents(path: Path) -> Dataset:
    """Return the documents of a file, one JSON object a line.

    Raises:
        UserError: a line is none, or has other fields or types than the first.
    """
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; write it, a document of the task's dataset a line, or leave"
            " the task out of --tasks"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error}); save it as such") from None
    documents = []
    for number, line in enumerate(lines, start=1):
        try:
            documents.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number} is not valid JSON ({error})") from None
        # a Dataset would fill what is missing in a line with nulls, and lm-eval score those
        if not isinstance(documents[-1], dict) or _fields(documents[-1]) != _fields(documents[0]):
            raise UserError(
                f"{path}, line {number} is no object with the fields of line 1 and their types,"
                f" {', '.join(_fields(documents[0]))}; correct it"
            )
    return Dataset.from_list(documents)


def _fields(value: Any, name: str = "") -> list[str]:
    """Return the names of all fields with their types."""
    if isinstance(value, dict):
        return sorted(field for key in value for field in _fields(value[key], f"{name}.{key}"))
    return [f"{name.removeprefix('.')} ({type(value).__name__})"]
