"""The study that a command is about: the options that name it, and the study that they name."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from base.errors import UserError
from base.frozen import NAME_PATTERN
from base.names import take_one_of
from base.sharing import follow_root
from study.definition import Study, load_study
from study.recipes.resolve import is_recipe_file, recipe_names, recipe_of_file, resolve
from study.text.own import TextOptions

Name = Annotated[
    str,
    typer.Argument(
        help="a recipe, see 'python -m study list', a .py file with one of yours, or a study below"
        " the root"
    ),
]
StudyName = Annotated[str, typer.Argument(help="a study, the directory's name below the root")]
Root = Annotated[
    Path,
    typer.Option(help="directory of all studies and of the MLflow store", callback=follow_root),
]
Profile = Annotated[
    str, typer.Option(help="'full', or 'smoke': the same study at a size a test can afford")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help=(
            "PATH=VALUE of the study, or of run.json for every run, such as"
            " quantization.eval_tokens=4096; part of the study's name. Of a trajectory also source,"
            " every, stage, family or averages. settings=paper measures as arXiv 2510.06213."
            " Repeatable."
        ),
    ),
]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        metavar="FILES...|PREFIX",
        help=(
            "instead of the recipe's text: text, .jsonl, .json or .parquet files, also .gz or .zst;"
            " PREFIX of a token file; or the directory of a study. Part of the study's name."
        ),
    ),
]
TokenizerDirectory = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        help="of --text: directory of its tokenizer; default for FILES: one trained on them",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        help="of --text FILES: key of a line, or column of a table, that holds the text",
        show_default="text",
    ),
]

Every = Annotated[bool, typer.Option("--all", help="all of it, beyond one screen")]


class TextCommand(TyperCommand):
    """A command whose --text takes every word up to the next option, such as a shell's *.jsonl."""

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


def directory_of(name: str, root: Path) -> Path:
    """Return the directory of a study; UserError for one that no study can have."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UserError(
            f"{name!r:.80} cannot be the name of a study; give that of a directory below the root"
        )
    return root / name


def study_of(
    name: str,
    root: Path,
    profile: str,
    settings: list[str] | None,
    text: list[Path] | None,
    tokenizer: Path | None,
    key: str | None,
) -> Study:
    """Return the study of a recipe, or the one below the root that has the name."""
    for option, value in (("--tokenizer", tokenizer), ("--key", key)):
        if value and not text:
            raise UserError(f"{option} {value} belongs to --text; give the text too")
    options = TextOptions(tuple(text), tokenizer, key) if text else None
    if not is_recipe_file(name) and name not in recipe_names():
        directory = directory_of(name, root)
        if (directory / "study.json").exists():
            if settings or options:
                raise UserError(
                    f"{'--set' if settings else '--text'} belongs to a recipe, see 'python -m study"
                    f" list'; {name} is a study and has its own"
                )
            return load_study(directory)
    return resolve(name, profile, tuple(settings or ()), options, root)


def existing(name: str, root: Path) -> tuple[Path, Study]:
    """Return directory and study of a name below the root; of a file, that of its recipe."""
    study_name = recipe_of_file(Path(name)).name if is_recipe_file(name) else name
    directory = directory_of(study_name, root)
    if not (directory / "study.json").exists():
        studies = sorted(path.parent.name for path in root.glob("*/study.json"))
        if studies:
            raise UserError(
                f"{directory / 'study.json'} does not exist; {take_one_of(study_name, studies)}, or"
                " start it with 'python -m study run NAME --root ROOT'"
            )
    return directory, load_study(directory)
