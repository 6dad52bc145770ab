"""The commands of all folders, read off their typer apps."""

import importlib
from collections.abc import Iterator
from typing import NamedTuple

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

FOLDERS = ("train", "ckpt_tools", "quant_eval", "curvature", "study", "slurm")


class CommandEntry(NamedTuple):
    """A command with the words that call it.

    Attributes:
        words: that call it, after `python -m`.
        command: as typer knows it.
    """

    words: str
    command: TyperCommand

    @property
    def arguments(self) -> list[TyperArgument]:
        """The arguments that it takes, in their order."""
        return [argument for argument in self.command.params if isinstance(argument, TyperArgument)]

    @property
    def options(self) -> list[TyperOption]:
        """The options that it takes, without --help."""
        return [option for option in self.command.params if isinstance(option, TyperOption)]


def entries() -> list[CommandEntry]:
    """Return every command of every folder, those included that only other commands call."""
    commands: list[CommandEntry] = []
    for folder in FOLDERS:
        top = typer.main.get_command(importlib.import_module(f"{folder}.__main__").app)
        assert isinstance(top, TyperCommand | TyperGroup)
        commands += _below(folder, top)
    return commands


def _below(words: str, command: TyperCommand | TyperGroup) -> Iterator[CommandEntry]:
    if not isinstance(command, TyperGroup):
        yield CommandEntry(words, command)
        return
    for name, inner in command.commands.items():
        assert isinstance(inner, TyperCommand | TyperGroup)
        yield from _below(f"{words} {name}", inner)
