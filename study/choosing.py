"""Which study a command means: the options that name it, and what they stand for."""

import re
from pathlib import Path
from typing import Annotated

import typer

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
    Path | None, typer.Option(help="trajectory: a study whose text is measured on; default: C4 and RefinedWeb")
]


def released_of(
    source: str | None, every: int | None, stage: str | None, family: str | None, text: Path | None
) -> Released | None:
    """What the options name; None without any. UserError where they choose of nothing."""
    if source is not None:
        return Released(source, every, stage, family, text)
    if not every and not stage and not family and not text:
        return None
    raise UserError(f"--every, --stage, --family and --text choose revisions of a {TRAJECTORY}; give its --source")


def directory_of(name: str, root: Path) -> Path:
    """The directory of a study; UserError for a name that is none, before it stands in a path."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UserError(f"{name!r:.80} is no name of a study; give that of a directory below the root")
    return root / name


def wanted(name: str, root: Path, profile: str, settings: list[str] | None, released: Released | None) -> Study:
    """The study of a recipe; a name below the root that is none goes on with its study.json."""
    directory = directory_of(name, root)
    if name in recipe_names() or released or settings or not (directory / "study.json").exists():
        return resolve(name, profile, tuple(settings or ()), released)
    return load_study(directory)


def existing(name: str, root: Path, profile: str, settings: list[str] | None) -> tuple[Path, Study]:
    """The directory and study of a name; a recipe's name means the study of that profile with those settings."""
    if name == TRAJECTORY:
        raise UserError(f"{TRAJECTORY} names no study; give that of its directory, such as {TRAJECTORY}-OLMo-2-1124-7B")
    if name in recipe_names():
        name = resolve(name, profile, tuple(settings or ())).name
    elif settings:
        raise UserError(
            f"--set belongs to a recipe, see 'python -m study list'; {name} is a study and has its settings"
        )
    directory = directory_of(name, root)
    return directory, load_study(directory)
