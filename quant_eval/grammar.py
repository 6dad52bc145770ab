"""The parts of a spec's name: a field of a quantizer says how it is written, as its `Part`.

`quantizer` has the fields, `specs` reads a whole name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

NUMBER = r"\d{1,3}(?:\.\d{1,6})?"
COUNT = r"\d{1,6}"


@dataclass(frozen=True)
class Part:
    """The part of a setting: in a name, after a hyphen, and in words.

    Attributes:
        syntax: the part as the grammar shows it.
        pattern: regular expression of the part.
        value: returns the setting that a part states.
        text: returns the part of a setting.
        words: returns the setting in a title; "": it is left out.
    """

    syntax: str
    pattern: str
    value: Callable[[str], Any]
    text: Callable[[Any], str]
    words: Callable[[Any], str]

    def read(self, field: str, text: str) -> dict[str, Any]:
        """Return the settings that a part states."""
        return {field: self.value(text)}

    def write(self, field: str, values: Mapping[str, Any]) -> str:
        """Return the part for these settings."""
        return self.text(values[field])


def number(label: str, words: str, kind: type[int] | type[float] = float) -> Part:
    """Return the part of a setting that is a number after a label.

    >>> damping = number("damp", "damping {:g}")
    >>> damping.value("damp0.01"), damping.text(0.01), damping.words(0.01)
    (0.01, 'damp0.01', 'damping 0.01')
    """

    def text(value: float) -> str:
        # As many decimals as NUMBER reads, so that each name is read back; 0.010000 becomes 0.01.
        shown = f"{value:.6f}".rstrip("0").rstrip(".") if kind is float else str(value)
        return f"{label}{shown}"

    return Part(
        syntax=f"{label}<number>",
        pattern=label + (NUMBER if kind is float else COUNT),
        value=lambda part: kind(part.removeprefix(label)),
        text=text,
        words=words.format,
    )


def choice(values: Mapping[str, Any], titles: Mapping[Any, str]) -> Part:
    """Return the part of a setting that is given by a word.

    A value without a word is a default, which no name states.
    """
    texts = {value: word for word, value in values.items()}
    syntax = "|".join(values)
    return Part(syntax, syntax, values.__getitem__, texts.__getitem__, titles.__getitem__)
