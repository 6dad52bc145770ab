"""`--set PATH=VALUE`: one rule for every field of a run, of a study and of a released model."""

import difflib
import hashlib
import re
from collections.abc import Collection, Iterable
from typing import Any

from base.errors import UserError
from base.names import nearest
from base.reading import NotJsonError, parse_json

# Characters that a name repeats of a value, and of all settings; file systems end names at 255.
LONGEST_NAMED, LONGEST_IN_ALL = 64, 80
MOST_NAMED = 3  # paths that a refusal lists where none is the nearest


def path_of(setting: str) -> str:
    """Return PATH of PATH=VALUE."""
    return setting.partition("=")[0]


def check_path(setting: str, paths: Collection[str]) -> None:
    """Raise UserError, with the nearest paths, for a setting of none of these."""
    path, separator, _ = setting.partition("=")
    if separator and path in paths:
        return
    near = nearest(path, paths)
    if near == path:
        hint = "write PATH=VALUE"
    elif near:
        hint = f"did you mean {near}?"
    else:
        close = difflib.get_close_matches(path[:100], paths, n=MOST_NAMED, cutoff=0)
        hint = f"the nearest are {', '.join(close)}"
    raise UserError(f"--set {setting}: no such setting; {hint}")


def change(content: dict[str, Any], setting: str) -> None:
    """Change the value at PATH of nested content. VALUE is JSON, or else the text that it is.

    >>> content = {"optimizer": {"peak_lr": 1e-3}}
    >>> change(content, "optimizer.peak_lr=6e-4")
    >>> content
    {'optimizer': {'peak_lr': 0.0006}}
    """
    path, _, text = setting.partition("=")
    *parents, key = path.split(".")
    for parent in parents:
        content = content[parent]
        if not isinstance(content, dict):  # an earlier setting took it away
            raise UserError(f"--set {setting}: {parent} is {content}; leave one of the two out")
    try:
        content[key] = parse_json(text, f"--set {setting:.40}", "give another value")
    except NotJsonError:
        content[key] = text


def name_with(name: str, settings: Iterable[tuple[str, str]]) -> str:
    """Return the name of a run or a study with its settings: 'lr3e-4-peak_lr=6e-4'.

    Names are directories: a long value is a hash of it, '-planes=sha1b4f0e9851971998', and so are
    all settings together where there are many, '-set=sha5d41402abc4b2a76'.
    """
    parts = "".join(_name_part(key, value) for key, value in settings)
    if len(parts) > LONGEST_IN_ALL:
        parts = f"-set={_hash(parts)}"
    return name + parts


def _name_part(key: str, value: str) -> str:
    short = value if len(value) <= LONGEST_NAMED else _hash(value)
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", f"-{key}={short}")


def _hash(text: str) -> str:
    return f"sha{hashlib.sha256(text.encode()).hexdigest()[:16]}"
