"""Errors of the user: one line that names the next action."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from base.names import nearest

MOST_CHARACTERS = 1000  # of a line


class UserError(ValueError):
    """Bad input: a message of one line that names the next action, and exit code 2."""


def printable(text: str) -> str:
    """Return text with a question mark for each terminal control character; lines stay lines."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "?" for character in text
    )


def one_line(text: str) -> str:
    """Return text as one line for a terminal, and of one over MOST_CHARACTERS both ends.

    It may hold what somebody else wrote.
    """
    line = printable(" ".join(text.split()))
    if len(line) <= MOST_CHARACTERS:
        return line
    return f"{line[: MOST_CHARACTERS // 2]} ... {line[-MOST_CHARACTERS // 2 :]}"


def explain_validation(source: str, error: ValidationError, kind: Any = None) -> UserError:
    """Return the first problem that pydantic found in `source`, as one line with its key.

    `kind` is the type that it was to be; its fields are the names that an unknown key may mean.
    """
    problem = error.errors()[0]
    # After a field of several kinds pydantic puts the kind's name, which is no key of the file.
    tagged, location = set(_fields_of_kinds(kind)), problem["loc"]
    parts = [
        part
        for part, before in zip(location, ("", *location), strict=False)
        if before not in tagged
    ]
    key = ".".join(map(str, parts)) or "the whole file"
    if problem["type"] == "extra_forbidden":
        near = nearest(str(problem["loc"][-1]), fields_of(kind)) if problem["loc"] else None
        hint = f"did you mean {near}?" if near else "remove it or correct its spelling"
        return UserError(f"{source}: unknown key '{key}'; {hint}")
    if problem["type"] == "missing":
        return UserError(f"{source}: key '{key}' is missing; add it")
    if problem["type"] == "json_invalid":
        return UserError(f"{source} is not valid JSON ({problem['ctx']['error']}); restore it")
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error" and not problem["loc"]:  # keys that do not go together
        return UserError(f"{source}: {reason}")
    if problem["type"] == "value_error" and isinstance(problem["input"], dict):  # in a part
        action = "" if ";" in reason else "; correct one of them"
        return UserError(f"{source}: '{key}': {reason}{action}")
    return UserError(
        f"{source}: '{key}': {reason} (got {problem['input']!r:.80}); correct the value"
    )


def fields_of(kind: Any) -> Iterator[str]:
    """Yield the names of all fields of a type, and of the types of its fields."""
    for name, _ in _all_fields(kind):
        yield name


def _fields_of_kinds(kind: Any) -> Iterator[str]:
    """Yield the names of the fields that have one of several types, told by a key."""
    for name, field in _all_fields(kind):
        if field.discriminator:
            yield name


def _all_fields(kind: Any) -> Iterator[tuple[str, FieldInfo]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield name, field
            yield from _all_fields(field.annotation)
    # Of a union or a container the models are among the arguments.
    for part in get_args(kind):
        yield from _all_fields(part)
