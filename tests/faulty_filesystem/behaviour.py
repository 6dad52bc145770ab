"""The settings of a mount: delays, caches, locks, and operations that fail."""

import json
from dataclasses import asdict, dataclass, field
from typing import Literal, Self

Locks = Literal["shared", "local", "none"]


@dataclass(frozen=True)
class Fault:
    """An operation of a mount that fails with an error."""

    operation: str  # a method of `Filesystem`, such as "open", or "write_back"
    error: str  # such as "EIO"
    rate: float = 0.0  # share of the operations that fail
    after: bool = False  # done all the same, as if only the answer were lost
    until: int = 10**9  # so many may fail


@dataclass(frozen=True)
class Behaviour:
    """The settings of a mount, which may change while it is in use.

    Attributes:
        strike: this operation from now on fails, counted over all that can; 0 for none.
    """

    seed: int = 0
    delays: dict[str, float] = field(default_factory=dict)  # seconds by operation, "*" for others
    cache_seconds: float = 0.0  # of names that are there or not, attributes and listings
    buffered: bool = True  # others see what is written after close or fsync, else at once
    stale_if_removed: bool = False  # files that another mount removed cannot be read any more
    locks: Locks = "shared"  # with other mounts; of this mount alone; refused
    faults: tuple[Fault, ...] = ()
    strike: int = 0
    strike_error: str = "EIO"
    strike_after: bool = False

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what `to_json` wrote."""
        values = json.loads(text)
        values["faults"] = tuple(Fault(**fault) for fault in values["faults"])
        return cls(**values)
