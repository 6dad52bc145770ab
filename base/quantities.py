"""Numbers with their intervals as people read them: few digits, and the unit once in a heading.

Tables, verdicts, figures and commands use these; files keep all digits.
"""

import math
import re

DIGITS = 3  # significant, of an effect and of the ends of its interval, at most
# Differences of losses are thousandths of a nat: shown as such, their unit has the power of ten.
MILLI = 1000.0
MILLINATS = "10^-3 nats/token"
NONE = "-"  # what was not measured
POWER = re.compile(r"(?<=\b10)\^([-\d]+)")
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def typeset(text: str) -> str:
    """Return text for pages and pictures: powers of ten with raised digits.

    >>> typeset(MILLINATS)
    '10⁻³ nats/token'
    """
    return POWER.sub(lambda power: power[1].translate(RAISED), text)


def with_interval(value: float, low: float, high: float, scale: float = 1.0) -> str:
    """Return a value times `scale` with its interval, to the second digit of half its width.

    >>> with_interval(0.000659, 0.000363, 0.000957, MILLI), with_interval(-12.34, -30.1, 5.42)
    ('0.66 [0.36, 0.96]', '-12 [-30, 5]')
    >>> with_interval(1.23456, 1.23455, 1.23457), with_interval(54321.0, 40000.0, 70000.0)
    ('1.23 [1.23, 1.23]', '54000 [40000, 70000]')
    """
    numbers = [scale * number for number in (value, low, high)]
    last = _last_place(numbers)
    text, low_text, high_text = (rounded(number, last) for number in numbers)
    return f"{text} [{low_text}, {high_text}]"


def _last_place(numbers: list[float]) -> int:
    """Return the power of ten of the last digit of a value and the ends of its interval."""
    _, low, high = numbers
    largest = max(abs(number) for number in numbers)
    if not (math.isfinite(largest) and largest > 0):
        return 0
    last = math.floor(math.log10(largest)) - DIGITS + 1
    half = (high - low) / 2
    return max(last, math.floor(math.log10(half)) - 1) if half > 0 else last


def rounded(number: float, last: int) -> str:
    """Return a number to the digit of 10^last, without an exponent.

    >>> rounded(0.0004, -2), rounded(-1234.5, 1)
    ('0.00', '-1230')
    """
    # Rounded first: `last` may be above 0, where no format rounds. z: a rounded zero has no sign.
    return f"{round(number, -last):z.{max(0, -last)}f}"


def significant(number: float, digits: int = DIGITS) -> str:
    """Return a number with so many significant digits, and an exponent below 10^-4 or above 10^6.

    >>> significant(0.0012345), significant(123456.0), significant(1.5e-9), significant(0.5)
    ('0.00123', '123000', '1.5e-09', '0.5')
    """
    if not number or not 1e-4 <= abs(number) < 1e6:
        return f"{number:.{digits}g}"
    return f"{float(f'{number:.{digits}g}'):.10f}".rstrip("0").rstrip(".")


def size_in_words(count: float) -> str:
    """Return bytes in the unit that leaves one to three digits before the point.

    >>> size_in_words(46e6), size_in_words(12.34e9), size_in_words(999.6e9), size_in_words(0)
    ('46 MB', '12.3 GB', '1 TB', '0 bytes')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # From where three digits round up to a whole unit.
        if count >= 0.9995 * size:
            return f"{significant(count / size)} {unit}"
    return f"{count:.0f} bytes"
