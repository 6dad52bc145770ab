"""Documents of tasks from local JSON Lines files, checked before a model is asked anything."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quant_eval.tasks.table import Kind
from train.command import UserError

MEANING: dict[Kind, str] = {"text": "a text", "texts": "a list of texts", "integer": "an integer", "digits": "a number"}


def _fits(value: Any, kind: Kind) -> bool:
    if kind == "integer":
        return type(value) is int
    if kind == "text":
        return isinstance(value, str)
    if kind == "digits":
        return type(value) is int or (isinstance(value, str) and value.isdecimal())
    return isinstance(value, list) and len(value) > 0 and all(isinstance(part, str) for part in value)


def _problem(document: Any, fields: Mapping[str, Kind]) -> str | None:
    """What is wrong with one document, if anything."""
    if not isinstance(document, dict):
        return "it is no JSON object"
    for name, kind in fields.items():
        value: Any = document
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                return f"field '{name}' is missing"
            value = value[part]
        if not _fits(value, kind):
            return f"field '{name}' is not {MEANING[kind]} (got {value!r:.80})"
    return None


def read_documents(path: Path, fields: Mapping[str, Kind]) -> list[dict[str, Any]]:
    """The documents of a file, one JSON object a line; UserError names the first line that is none or lacks a field."""
    needs = f"a document here is one line of JSON with {', '.join(fields)}"
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; write it ({needs}), or leave the task out of --tasks") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error}); save it as such") from None
    if lines == [""]:
        raise UserError(f"{path} is empty; {needs}")
    documents = []
    for number, line in enumerate(lines, start=1):
        try:
            document = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number} is not valid JSON ({error}); {needs}") from None
        problem = _problem(document, fields)
        if problem:
            raise UserError(f"{path}, line {number}: {problem}; {needs}")
        documents.append(document)
    return documents
