"""Which study a command means: the options that name it, and what they stand for."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from study.own_text import Asked, given_of
from study.recipes import TRAJECTORY, Released, recipe_names, resolve
from study.settings import Study, load_study
from train.command import UserError
from train.frozen import NAME_PATTERN

Name = Annotated[str, typer.Argument(help="a recipe, see 'python -m study list', or a study below the root")]
StudyName = Annotated[str, typer.Argument(help="a study, the directory's name below the root")]
Root = Annotated[Path, typer.Option(help="directory of all studies and of the MLflow store")]
Profile = Annotated[str, typer.Option(help="'full', or 'smoke': the same study at a size a test can afford")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="key.path=value of run.json, for every run; stands in the study's name. Repeatable."),
]
Source = Annotated[
    str | None, typer.Option(help="trajectory: OWNER/NAME on the hub, or a directory with a directory per revision")
]
Every = Annotated[
    int | None, typer.Option(min=1, help="trajectory: of each stage every so manieth revision, and the last")
]
Stage = Annotated[str | None, typer.Option(help="trajectory: only this stage")]
Family = Annotated[str | None, typer.Option(help="trajectory: repository whose naming a directory of revisions has")]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        metavar="FILES...|PREFIX",
        help="instead of the recipe's text: text, .jsonl or .parquet files, also .gz or .zst; PREFIX of a token file; "
        "TRAIN HELD_OUT CALIBRATION prefixes; or the directory of a study. Stands in the study's name.",
    ),
]
TokenizerDirectory = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="of --text: directory of its tokenizer; default for FILES: one trained on them"),
]


class TextCommand(TyperCommand):
    """A command whose --text takes every word up to the next option, so that a shell's *.jsonl can stand there."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat --text before each of its words."""
        repeated: list[str] = []
        in_text = False
        for word in args:
            if word.startswith("-"):
                in_text = word == "--text"
                repeated += [] if in_text else [word]
            else:
                repeated += ["--text", word] if in_text else [word]
        if args and args[-1] == "--text":
            repeated.append("--text")  # for the parser to say that a value is missing
        return super().parse_args(ctx, repeated)


def released_of(source: str | None, every: int | None, stage: str | None, family: str | None) -> Released | None:
    """What the options name; None without any. UserError where they choose of nothing."""
    if source is not None:
        return Released(source, every, stage, family)
    if not every and not stage and not family:
        return None
    raise UserError(f"--every, --stage and --family choose revisions of a {TRAJECTORY}; give its --source")


def asked_of(text: list[Path] | None, tokenizer: Path | None) -> Asked | None:
    """Return the text that is asked for; None without --text."""
    if text:
        return Asked(tuple(text), tokenizer)
    if tokenizer:
        raise UserError(f"--tokenizer {tokenizer} belongs to --text; give the text too")
    return None


def directory_of(name: str, root: Path) -> Path:
    """The directory of a study; UserError for a name that is none, before it stands in a path."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UserError(f"{name!r:.80} is no name of a study; give that of a directory below the root")
    return root / name


def wanted(
    name: str,
    root: Path,
    profile: str,
    settings: list[str] | None,
    released: Released | None,
    asked: Asked | None = None,
) -> Study:
    """The study of a recipe; a name below the root that is none resumes from its study.json."""
    directory = directory_of(name, root)
    if name in recipe_names() or not (directory / "study.json").exists():
        return resolve(name, profile, tuple(settings or ()), released, asked, root)
    if released:
        return resolve(name, profile, tuple(settings or ()), released)  # which says what they belong to
    _refuse_changes(name, settings, asked)
    return load_study(directory)


def _refuse_changes(name: str, settings: list[str] | None, asked: Asked | None) -> None:
    if settings or asked:
        option, has = ("--set", "settings") if settings else ("--text", "text")
        raise UserError(
            f"{option} belongs to a recipe, see 'python -m study list'; {name} is a study and has its {has}"
        )


def existing(
    name: str, root: Path, profile: str, settings: list[str] | None, asked: Asked | None = None
) -> tuple[Path, Study]:
    """The directory and study of a name; a recipe's name means the study of that profile, settings and text."""
    if name == TRAJECTORY:
        raise UserError(f"{TRAJECTORY} names no study; give that of its directory, such as {TRAJECTORY}-OLMo-2-1124-7B")
    if name in recipe_names():
        name = resolve(name, profile, tuple(settings or ())).name + (given_of(asked).suffix if asked else "")
    else:
        _refuse_changes(name, settings, asked)
    directory = directory_of(name, root)
    return directory, load_study(directory)
