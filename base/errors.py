"""Errors of the user: one line that names the next action."""

from pydantic import ValidationError


class UserError(ValueError):
    """Bad input: a message of one line that names the next action, and exit code 2."""


def printable(text: str) -> str:
    """Return text with a question mark for each terminal control character; lines stay lines."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "?" for character in text
    )


def explain_validation(source: str, error: ValidationError) -> UserError:
    """Return the first problem that pydantic found in `source`, as one line with its key."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"]) or "the whole file"
    if problem["type"] == "extra_forbidden":
        return UserError(f"{source}: unknown key '{key}'; remove it or correct its spelling")
    if problem["type"] == "missing":
        return UserError(f"{source}: key '{key}' is missing; add it")
    if problem["type"] == "json_invalid":
        return UserError(f"{source} is not valid JSON ({problem['ctx']['error']}); restore it")
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error" and not problem["loc"]:  # keys that do not go together
        return UserError(f"{source}: {reason}")
    return UserError(
        f"{source}: '{key}': {reason} (got {problem['input']!r:.80}); correct the value"
    )
