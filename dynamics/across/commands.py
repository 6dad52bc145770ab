"""The command that compares studies."""

from pathlib import Path
from typing import Annotated

import typer

from study.choosing import Root, existing


def compare(
    names: Annotated[list[str], typer.Argument(help="studies below the root, of any size")],
    root: Root = Path("runs"),
    out: Annotated[
        Path | None, typer.Option(help="directory to write", show_default="ROOT/compared")
    ] = None,
) -> None:
    """Put the ends of training of several studies into one table, and fit their scaling.

    A row has the size of the model, tokens, engine and seed. The figure draws each error against
    the size, with a power law in parameters N and tokens per parameter D/N from 3 sizes on.

    Example: python -m study compare olmo2-30m-lr olmo2-190m-lr olmo2-1b-lr
    """
    from dynamics.across.comparison import write_comparison

    studies = dict(existing(name, root) for name in names)
    for line in write_comparison(studies, out or root / "compared"):
        typer.echo(line)
