"""Progress of the downloads of uv or pip, read off the lines that it prints."""

from __future__ import annotations  # older Pythons, which are refused, read this file too

import re
from pathlib import Path

# uv: "Downloading torch (846.9MiB)" for each at once, then " Downloaded torch".
# pip: "  Downloading torch-2.14.0-....whl (888.1 MB)" one after the other.
BEGUN = re.compile(r"\s*Downloading (\S+) \(([\d.]+) ?([kKMG]?)(i?)B\)")
ENDED = re.compile(r"\s*Downloaded (\S+)")
PIPS_NEXT = ("Collecting ", "Installing collected", "Building wheels")
POWERS = {"": 0, "k": 1, "M": 2, "G": 3}
LEAST_SHARE = 0.05  # of the bytes: before, the time that is left is a guess


class Download:
    """Bytes that are there, those expected, and what is on its way."""

    def __init__(self, expected: float, folder: Path) -> None:
        """Read lines of a download of about `expected` bytes; pip has its files in `folder`."""
        self.expected, self.folder = expected, folder
        self.complete = 0.0
        self.underway: dict[str, float] = {}

    def read(self, line: str) -> None:
        """Take one line of the log."""
        if begun := BEGUN.match(line):
            name, number, power, binary = begun.groups()
            if name.endswith((".whl", ".gz", ".metadata")):
                self._end_all()  # pip has one at a time
            self.underway[name] = (
                float(number) * (1024 if binary else 1000) ** POWERS[power.replace("K", "k")]
            )
        elif ended := ENDED.match(line):
            self.complete += self.underway.pop(ended[1], 0.0)
        elif line.startswith(PIPS_NEXT):
            self._end_all()

    def _end_all(self) -> None:
        self.complete += sum(self.underway.values())
        self.underway.clear()

    def words(self, seconds: float) -> str:
        """Return how much is there after so many seconds, how long the rest takes, and what is
        underway.
        """
        underway = dict(self.underway)  # another thread reads on
        name, size = max(underway.items(), key=lambda item: item[1], default=("nothing", 0.0))
        done = self.complete + self._part_of(name)
        total = max(self.expected, self.complete + sum(underway.values()))
        others = f" and {len(underway) - 1} more" if len(underway) > 1 else ""
        words = f"{done / 1e9:.2f} of about {total / 1e9:.1f} GB"
        if done / total > LEAST_SHARE:
            minutes, rest = divmod(round(seconds * (total - done) / done), 60)
            words += f", about {minutes}:{rest:02} left"
        return f"{words}; now {name.partition('-')[0]} ({size / 1e6:,.0f} MB){others}"

    def _part_of(self, name: str) -> float:
        """Return the bytes that pip has of a file by now; uv unpacks what it reads, at once."""
        return sum(path.stat().st_size for path in self.folder.glob(f"pip-unpack-*/{name}"))
