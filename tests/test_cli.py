"""The commands and options of this project: named rightly in messages, readable at 80 columns."""

import errno
import os
import re
from pathlib import Path

import pytest
import typer

from docs.commands import CommandEntry, entries
from tests.runs import error_line, python

PROJECT = Path(__file__).resolve().parents[1]
ENTRIES = entries()


def test_messages_name_commands_that_exist():
    """Errors and help often end with the command to run next."""
    words = {entry.words for entry in ENTRIES}
    programs = {command.split()[0] for command in words}
    for program in programs | {"base"}:
        for path in (PROJECT / program).rglob("*.py"):
            source = re.sub(r'"\s*\n\s*f?"', "", path.read_text())  # a string over several lines
            for named in re.findall(r"-m ((?:\w+) [a-z][a-z-]+)", source):
                assert named in words or named.split()[0] not in programs, f"{path}: {named}"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            "train run here --hang-seconds 1e12",
            "'hang_seconds': Input should be less than or equal",
        ),
        ("train run here --hang-seconds nan", "'hang_seconds': Input should be"),
        ("study mirror tiny --run lr3e-3 --follow 1000000000000", "less than or equal to 604800"),
        ("study mirror tiny --run lr3e-3 --follow nan", "Input should be a valid integer"),
        ("slurm status tiny --watch 1000000000000", "less than or equal to 604800"),
        ("slurm doctor --site site.toml --wait 1000000000000", "less than or equal to 604800"),
    ],
)
def test_a_wait_without_end_is_refused(words, complaint):
    """Python's clocks overflow: a watchdog would end alone, and its training go on unwatched."""
    assert complaint in error_line(python(*words.split()))


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "correct the path or its permissions, or free space, and run again"),
        (errno.EIO, "look at its disk, mount or server, and run again"),
        (errno.ESTALE, "look at its disk, mount or server, and run again"),
    ],
)
def test_an_error_of_a_filesystem_says_what_to_look_at(in_process, number, remedy):
    app = typer.Typer()

    @app.command()
    def write() -> None:
        raise OSError(number, os.strerror(number), "runs/table")

    code, _, lines = in_process(app, "write")
    assert (code, lines) == (2, [f"error: runs/table: {os.strerror(number)}; {remedy}"])


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.words)
def test_help_shows_every_option_whole(entry: CommandEntry, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    with pytest.raises(SystemExit, match="0"):
        entry.command.main(["--help"], prog_name=f"python -m {entry.words}")
    shown = capsys.readouterr().out
    words = set(shown.replace("│", " ").replace(",", " ").split())
    names = {name for option in entry.options for name in (*option.opts, *option.secondary_opts)}
    assert not names - words
    assert max(map(len, shown.splitlines())) <= 80
