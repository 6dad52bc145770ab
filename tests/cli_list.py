"""Commands and options of all folders, read off the apps: `python -m tests.cli_list >
tests/cli.txt`.
"""

import importlib
from collections.abc import Iterator
from typing import NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

FOLDERS = ("train", "ckpt_tools", "quant_eval", "curvature", "study", "slurm")


class Entry(NamedTuple):
    """One command.

    Attributes:
        words: that call it, after `python -m`.
        command: as typer knows it.
    """

    words: str
    command: TyperCommand

    @property
    def options(self) -> list[TyperOption]:
        """The options that it takes, without --help."""
        return [one for one in self.command.params if isinstance(one, TyperOption)]

    def lines(self) -> list[str]:
        """Return the command, then a line per option with all its names."""
        names = [" ".join((*one.opts, *one.secondary_opts)) for one in self.options]
        return [self.words, *(f"    {name}" for name in names)]


def entries() -> list[Entry]:
    """Return every command of every folder."""
    found: list[Entry] = []
    for folder in FOLDERS:
        top = typer.main.get_command(importlib.import_module(f"{folder}.__main__").app)
        assert isinstance(top, TyperCommand | TyperGroup)
        found += _below(folder, top)
    return found


def _below(words: str, command: TyperCommand | TyperGroup) -> Iterator[Entry]:
    if isinstance(command, TyperGroup):
        for name, one in command.commands.items():
            assert isinstance(one, TyperCommand | TyperGroup)
            yield from _below(f"{words} {name}", one)
    else:
        yield Entry(words, command)


def listed() -> str:
    """Return the text of tests/cli.txt."""
    return "".join(f"{line}\n" for entry in entries() for line in entry.lines())


if __name__ == "__main__":
    print(listed(), end="")
