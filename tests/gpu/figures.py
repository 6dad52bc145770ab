"""Figures with their limits, and the table of them."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor


class SkippedError(Exception):
    """A check that this machine cannot make; the message says why."""


class CheckedFigure(NamedTuple):
    """A measured number with its limits.

    Attributes:
        name: of the figure.
        value: None for a check that failed before it measured, or was not made.
        unit: of the value.
        least, most: that are accepted; None of both is a figure that is recorded and not judged.
        note: assumptions behind a limit, or the reason for no value.
        absent: why there is no value but a failure: this machine cannot make the check, or no time
            was left for it.
    """

    name: str
    value: float | None
    unit: str = ""
    least: float | None = None
    most: float | None = None
    note: str = ""
    absent: Literal["", "skipped", "NOT RUN"] = ""

    @property
    def verdict(self) -> str:
        """'ok', 'FAILED', 'recorded', 'skipped' or 'NOT RUN'."""
        if self.absent:
            return self.absent
        if self.value is None or not math.isfinite(self.value):
            return "FAILED"
        if self.least is None and self.most is None:
            return "recorded"
        low, high = (
            self.least is None or self.value >= self.least,
            self.most is None or self.value <= self.most,
        )
        return "ok" if low and high else "FAILED"

    @property
    def limit(self) -> str:
        """The limits of the value, in words."""
        least = "" if self.least is None else f">= {self.least:.4g}"
        most = "" if self.most is None else f"<= {self.most:.4g}"
        return ", ".join(filter(None, (least, most)))

    def described(self) -> dict[str, Any]:
        """Return a value that JSON can hold: it has no infinity."""
        value = self.value if self.value is not None and math.isfinite(self.value) else None
        return self._asdict() | {"value": value, "verdict": self.verdict}


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what is expected, computed in float64 on the CPU."""
    exact = expected.cpu().double()
    return float((result.cpu().double() - exact).norm() / exact.norm())


def apart(values: list[float], other: list[float]) -> float:
    """Return the largest difference of two runs' losses, nats per token."""
    return max(abs(a - b) for a, b in zip(values, other, strict=True))


HEADER = ("figure", "value", "unit", "limit", "verdict")


def table(figures: Sequence[CheckedFigure]) -> str:
    """One line per figure, and its note below where there is one."""
    rows = [HEADER]
    for figure in figures:
        value = "" if figure.value is None else f"{figure.value:.4g}"
        rows.append((figure.name, value, figure.unit, figure.limit, figure.verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for line, figure in reversed(list(enumerate(figures, start=1))):
        if figure.note:
            lines.insert(line + 1, f"    {figure.note}")
    return "\n".join(lines)
