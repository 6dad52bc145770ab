"""A share of a text: documents chosen by their content alone, for `train.data.prepare`.

Every document has a place among a million, by a hash. Equal documents have the same place, so two
shares without a common place have no document in common, however often the text repeats itself.
"""

import hashlib
from typing import Self

from pydantic import Field, ValidationError, model_validator

from base.errors import UserError
from base.frozen import Frozen

PLACES = 1_000_000


def place_of(content: bytes) -> int:
    """Return the place of a document among `PLACES`.

    Example:
        >>> place_of(b"a document")
        665275
    """
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % PLACES


class Share(Frozen):
    """The documents with places [first, stop)."""

    first: int = Field(ge=0)
    stop: int = Field(le=PLACES)

    @model_validator(mode="after")
    def _holds_something(self) -> Self:
        if self.first >= self.stop:
            raise ValueError(f"share {self} is empty")
        return self

    def __str__(self) -> str:
        """Return the share as --share takes it."""
        return f"{self.first}-{self.stop}"

    def holds(self, content: bytes) -> bool:
        """Return whether a document is of this share."""
        return self.first <= place_of(content) < self.stop

    def overlaps(self, other: "Share") -> bool:
        """Return whether a document can be of both."""
        return self.first < other.stop and other.first < self.stop


EVERYTHING = Share(first=0, stop=PLACES)


def parse_share(text: str) -> Share:
    """Return '0-20000' as a share; UserError for anything that is none.

    Example: 2% and another 3%, without a document in common.
        >>> parse_share("0-20000").overlaps(parse_share("20000-50000"))
        False
    """
    first, _, stop = text.partition("-")
    try:
        return Share.model_validate({"first": first, "stop": stop})
    except ValidationError:
        raise UserError(
            f"--share {text} is not a share FIRST-STOP of {PLACES} places; write 0-20000 for 2%"
        ) from None
