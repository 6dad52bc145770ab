"""Errors of the user: one line that names the next action."""

from collections.abc import Iterable, Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from base.names import nearest, take_one_of

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
    problems = error.errors()
    # A misspelt key is missing, too: its spelling is the reason.
    problem = next((each for each in problems if each["type"] == "extra_forbidden"), problems[0])
    keys = ".".join(map(str, _keys(problem["loc"], kind)))
    key = keys or "the whole file"
    if problem["type"] == "extra_forbidden":
        name = str(problem["loc"][-1]) if problem["loc"] else ""
        near = nearest(name, fields_of(kind))
        # It may be the name of a field of another kind.
        is_other = near not in (None, name)
        hint = f"did you mean {near}?" if is_other else "remove it or correct its spelling"
        return UserError(f"{source}: unknown key '{key}'; {hint}")
    if problem["type"] == "missing":
        return UserError(f"{source}: key '{key}' is missing; add it")
    if problem["type"].startswith("union_tag"):
        return _explain_tag(source, keys, problem)
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


def _explain_tag(source: str, keys: str, problem: ErrorDetails) -> UserError:
    """Return the problem of a value whose kind is not stated, or is none of those there are."""
    context = problem["ctx"]
    tag = context["discriminator"].strip("'")
    name = f"{keys}.{tag}" if keys else tag
    if problem["type"] == "union_tag_not_found":
        return UserError(f"{source}: key '{name}' is missing; add it")
    expected = [tag.strip("' ") for tag in context["expected_tags"].split(",")]
    hint = take_one_of(context["tag"], expected)
    return UserError(f"{source}: '{name}': '{context['tag']:.80}' is unknown; {hint}")


def _keys(location: Iterable[int | str], kind: Any) -> Iterator[int | str]:
    """Yield the keys of a location; pydantic puts the kind after a field of several kinds."""
    tagged, field = set(_fields_of_kinds(kind)), ""
    for part in location:
        if isinstance(part, int):  # of a list of such values
            yield part
        elif field in tagged:
            field = ""
        else:
            field = part
            yield part


def fields_of(kind: Any) -> Iterator[str]:
    """Yield the names of all fields of a type, and of the types of its fields."""
    for name, _ in _all_fields(kind):
        yield name


def _fields_of_kinds(kind: Any) -> Iterator[str]:
    """Yield the names of the fields that have one of several types, told by a key."""
    for name, field in _all_fields(kind):
        if any(info.discriminator for info in (field, *_annotations(field.annotation))):
            yield name


def _annotations(kind: Any) -> Iterator[FieldInfo]:
    """Yield what pydantic is told of a type within others, such as one that may be None."""
    for part in get_args(kind):
        if isinstance(part, FieldInfo):
            yield part
        yield from _annotations(part)


def _all_fields(kind: Any) -> Iterator[tuple[str, FieldInfo]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield name, field
            yield from _all_fields(field.annotation)
    # Of a union or a container the models are among the arguments.
    for part in get_args(kind):
        yield from _all_fields(part)
