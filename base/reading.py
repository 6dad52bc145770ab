"""Files of unknown origin, read whole, and JSON by one set of rules; `base.files` writes it.

RFC 8259 leaves open what a parser does with a name given twice, with numbers beyond 64 bits and
with deep nesting, and Python's parser takes NaN besides. Here each of those is refused in one line,
but for integers beyond 64 bits, which are floats as in most other parsers.
"""

import itertools
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from base.digests import unsealed
from base.errors import UserError, explain_validation

MOST_BYTES = 1 << 30  # of a file that is read whole: records, not weights or tokens
MOST_DEPTH = 64  # of lists and objects in each other: Python's own limit depends on its caller
MOST_DIGITS = 400  # no float has as many before its point
RESTORE = "restore it"


class NotJsonError(UserError):
    """Text that is no JSON at all."""


class _RefusedError(ValueError):
    """JSON that no file of this project or of a model holds."""


def read_regular(path: Path) -> bytes:
    """Return the bytes of a record of unknown origin; UserError for what is no such file.

    Pipes and devices would block, or never end. A sparse file of terabytes takes no room on a disk.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123  it is open
        # What was opened is judged, not its path: another file may take the path in between.
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path} is not a regular file; put the file itself there")
        if status.st_size > MOST_BYTES:
            raise UserError(
                f"{path} has {status.st_size:,} bytes, no such file has over {MOST_BYTES:,};"
                " restore it"
            )
        return file.read()


def parse_json(text: bytes | str, source: object, next_action: str = RESTORE) -> Any:
    """Return the value of JSON text, in UTF-8 with or without a byte-order mark.

    Raises:
        NotJsonError: it is not JSON, or not UTF-8.
        UserError: it is nested too deeply, gives a name twice, or holds a number that is not finite
            or a string that is not Unicode text.
    """
    try:
        if isinstance(text, str):
            _check_strings(text)  # an argument has half a character for a byte that is no UTF-8
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(
            decoded,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_not_a_number,
            object_pairs_hook=_object,
        )
        if nested_deeper(value, MOST_DEPTH):
            raise RecursionError
        # From here on only an escape can spell these: half a character is no UTF-8, NUL no JSON.
        if "\\u" in decoded:
            _check_strings(value)
    except RecursionError:
        reason = f"nested more than {MOST_DEPTH} deep"
        raise UserError(f"{source}: {reason}; {next_action}") from None
    except _RefusedError as error:
        raise UserError(f"{source}: {error}; {next_action}") from None
    except ValueError as error:  # not UTF-8, or no JSON
        raise NotJsonError(f"{source} is not valid JSON ({error}); {next_action}") from None
    return value


def read_json(path: Path, next_action: str = RESTORE) -> Any:
    """Return the value of a JSON file; FileNotFoundError without it, else as `parse_json`."""
    return parse_json(read_regular(path), path, next_action)


def read_object(path: Path, next_action: str = RESTORE) -> dict[str, Any]:
    """Return the object that a JSON file holds; UserError for any other value."""
    value = read_json(path, next_action)
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; {next_action}")
    return value


def read_sealed(path: Path, next_action: str) -> dict[str, Any]:
    """Return the content of a record that `files.write_sealed` wrote.

    Raises:
        FileNotFoundError: the file does not exist.
        UserError: it is no such record, or was changed after it was written.
    """
    content = read_object(path, next_action)
    try:
        return unsealed(content)
    except ValueError as error:
        raise UserError(f"{path} {error}; {next_action}") from None


def read_model[Kind](kind: type[Kind] | TypeAdapter[Kind], path: Path) -> Kind:
    """Return the pydantic model that a JSON file holds; UserError names the first wrong key.

    FileNotFoundError passes, as callers know what makes the file.
    """
    return as_model(kind, read_json(path), path)


def as_model[Kind](kind: type[Kind] | TypeAdapter[Kind], value: Any, source: object) -> Kind:
    """Return the pydantic model of a JSON value; UserError names the first wrong key.

    The types are JSON's: a list makes a tuple, but text makes no number.
    """
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        # As text: in strict mode pydantic takes a list for a tuple from JSON alone.
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise explain_validation(str(source), error, kind) from None


def _integer(digits: str) -> int | float:
    if len(digits) > MOST_DIGITS:
        raise _RefusedError(f"a number of {len(digits.lstrip('-')):,} digits")
    value = int(digits)
    return value if -(2**63) <= value < 2**63 else _float(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _RefusedError(f"{digits[:20]} is beyond what a float holds")
    return value


def _not_a_number(name: str) -> NoReturn:
    raise _RefusedError(f"{name} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = counts.most_common(1)[0][0]
        raise _RefusedError(f"key {twice!r:.60} is given twice")
    return value


def _members(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def nested_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects are in each other, more than so deep.

    >>> nested_deeper({"a": [1]}, 2), nested_deeper({"a": [[]]}, 2)
    (False, True)
    """
    containers = [value] if isinstance(value, list | dict) else []
    for _ in range(depth):
        members = itertools.chain.from_iterable(map(_members, containers))
        containers = [member for member in members if isinstance(member, list | dict)]
        if not containers:
            return False
    return True


def _check_strings(value: Any) -> None:
    """Raise for half a character, which no file can take, and for NUL, which no path can."""
    pending = [value]
    while pending:
        member = pending.pop()
        if isinstance(member, dict):
            pending += [*member, *member.values()]
        elif isinstance(member, list):
            pending += member
        elif isinstance(member, str) and (
            "\0" in member or any("\ud800" <= character <= "\udfff" for character in member)
        ):
            raise _RefusedError(f"{member!r:.60} holds a character that text has not")
