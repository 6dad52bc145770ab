"""Immutable values that reject unknown keys and have a fingerprint."""

import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator

from base.digests import digest_of_json

# Names of runs and studies: fit for a directory and a shell.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._=+-]*$"
# A week, of every wait that a user sets: Python raises OverflowError for one of 292 years.
MOST_SECONDS = 7 * 24 * 3600


class Frozen(BaseModel):
    """An immutable value that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    # Fields that leave the fingerprint as it is.
    NOT_IDENTITY: ClassVar[frozenset[str]] = frozenset()

    def __hash__(self) -> int:
        """Return a hash of the plain fields: others, such as dictionaries, may have none."""
        return hash(tuple(value for _, value in self if isinstance(value, str | int | float)))

    def __iter__(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        """Yield the fields, without what was derived of them and cached."""
        for name in type(self).model_fields:
            yield name, getattr(self, name)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other fields, and without what was derived of these and cached."""
        copied = super().model_copy(update=update, deep=deep)
        # Cached properties are in __dict__ beside the fields, and pydantic copies all of it.
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


def in_words(settings: Frozen, *, defaults: bool = True) -> str:
    """Return settings by name, less what is empty or off, and with or without those at defaults.

    >>> class Quantizer(Frozen):
    ...     bits: int = 4
    ...     specs: tuple[str, ...] = ()
    >>> in_words(Quantizer(specs=("a", "b"))), in_words(Quantizer(bits=3), defaults=False)
    ('bits 4; specs a, b', 'bits 3')
    """
    words = []
    for name, value in settings:
        is_default = value == type(settings).model_fields[name].default
        if value in (None, (), False) or (is_default and not defaults):
            continue
        if isinstance(value, Frozen):
            value = f"({in_words(value, defaults=defaults)})"
        words.append(f"{name} {', '.join(map(str, value)) if isinstance(value, tuple) else value}")
    return "; ".join(words)


class Showable(Frozen):
    """A value whose texts figures and tables show: none holds a control character.

    Such a character ends the program that draws.
    """

    @model_validator(mode="after")
    def _is_text(self) -> Self:
        for text in _texts_in(self.model_dump()):
            if any(unicodedata.category(each)[0] == "C" for each in text if each not in "\n\t"):
                raise ValueError(f"{text!r:.80} holds a control character; remove it")
        return self


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every text in nested values, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, member in value.items():
            yield from _texts_in(key)
            yield from _texts_in(member)
    elif isinstance(value, tuple | list):
        for member in value:
            yield from _texts_in(member)


def fingerprint(value: Frozen) -> str:
    """Return 16 hex digits of the SHA-256 of the value's canonical JSON without NOT_IDENTITY."""
    return digest_of_json(value.model_dump(mode="json", exclude=set(value.NOT_IDENTITY)))[:16]
