"""The settings of run.json in which runs differ, and values in words.

`study.axes` makes axes of them, `dynamics.recipes.parts.sweep` names runs after them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from base.frozen import Frozen
from train.run.config import RunConfig

Value = int | float | str
YES, NO, NONE = "yes", "no", "none"

# What may differ without another training, and what says which training it is.
IGNORED = frozenset(
    {"seed", "branch_from", "save_steps", "evaluate_every_steps", "averages"}
    | RunConfig.NOT_IDENTITY
)
Settings = Mapping[str, Any]  # by dotted path


def differing_settings(runs: Sequence[RunConfig]) -> dict[str, dict[str, Value]]:
    """Return the settings that are not the same in all runs: path -> run -> value in words.

    Paths are dotted, in the order of run.json. A setting that a run does not have is 'none'.
    """
    by_run = {run.name: dict(_leaves(_content(run))) for run in runs}
    paths = dict.fromkeys(path for settings in by_run.values() for path in settings)
    differing = {}
    for path in paths:
        values = in_words([settings.get(path) for settings in by_run.values()])
        if len(set(values)) > 1:
            differing[path] = dict(zip(by_run, values, strict=True))
    return differing


def in_words(values: Sequence[Any]) -> list[Value]:
    """Return some values as numbers and words; of compound ones, that in which they differ.

    Example:
        >>> in_words([2, 0.5, True, None, (0.9, 0.95)])
        [2, 0.5, 'yes', 'none', '(0.9, 0.95)']
        >>> in_words(["../texts/web", "../texts/code"])
        ['web', 'code']
    """
    words = [_in_words(value) for value in _distinguishing(values)]
    lasts = [_last(word) for word in words]
    return lasts if len(set(lasts)) == len(set(words)) else words


def _content(run: RunConfig) -> dict[str, Any]:
    return run.model_dump(mode="json", exclude=set(IGNORED))


def _leaves(content: Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all settings below some keys; a list is one."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _distinguishing(values: Sequence[Any]) -> Iterable[Any]:
    """Return compound values as what differs between them, others as they are."""
    if not all(isinstance(value, Frozen | Mapping) for value in values):
        return values
    contents = [
        dict(_leaves(value.model_dump(mode="json") if isinstance(value, Frozen) else value))
        for value in values
    ]
    paths = [
        path
        for path in dict.fromkeys(path for content in contents for path in content)
        if len({repr(content.get(path)) for content in contents}) > 1
    ]
    named = [path for path in paths if path == "name"] or paths
    parts = [[content.get(path) for path in named] for content in contents]
    return [part[0] if len(part) == 1 else part for part in parts]


def _in_words(value: Any) -> Value:
    if value is None:
        return NONE
    if isinstance(value, bool):
        return YES if value else NO
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(str(_in_words(part)) for part in value)})"
    return str(value)


def _last(word: Value) -> Value:
    """Return the last part of a path."""
    return word.rstrip("/").rpartition("/")[2] if isinstance(word, str) else word
