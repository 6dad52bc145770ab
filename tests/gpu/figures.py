"""Figures with their limits, and the table of them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class SkippedError(Exception):
    """A check that this machine cannot make; the message says why."""


class CheckedFigure(NamedTuple):
    """A measured number with its limits.

    Attributes:
        name: of the figure.
        value: None for a check that was skipped or failed before it measured.
        unit: of the value.
        least, most: that are accepted; None of both is a figure that is recorded and not judged.
        note: assumptions behind a limit, or the reason for no value.
        skipped: whether the check does not apply here.
    """

    name: str
    value: float | None
    unit: str = ""
    least: float | None = None
    most: float | None = None
    note: str = ""
    skipped: bool = False

    @property
    def verdict(self) -> str:
        """'ok', 'FAILED', 'recorded' or 'skipped'."""
        if self.skipped:
            return "skipped"
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
