"""python -m ckpt_tools: training checkpoints to HF directories."""

from pathlib import Path
from typing import Annotated

import typer

from train.command import Progress, UserError, run_command

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def _commands() -> None:
    """Training checkpoints to HF directories."""


@app.command()
def export(
    paths: Annotated[list[Path], typer.Argument(help="CHECKPOINT OUT, or CHECKPOINT... with --into")],
    into: Annotated[Path | None, typer.Option(help="directory that takes one HF directory per checkpoint")] = None,
) -> None:
    """Export checkpoints and averages (RUN/checkpoints/*, of either engine at any layout) to verified HF directories.

    Example: python -m ckpt_tools export runs/tiny/lr3e-3/checkpoints/step00000640 hf/step00000640

    Example: python -m ckpt_tools export runs/tiny/lr3e-3/checkpoints/step* --into runs/tiny/lr3e-3/hf
    """
    from ckpt_tools.export import export as export_checkpoint

    if into:
        pairs = [(checkpoint, into / checkpoint.name) for checkpoint in paths]
    elif len(paths) == 2:
        pairs = [(paths[0], paths[1])]
    else:
        raise UserError(f"{len(paths)} path(s) without --into; give CHECKPOINT OUT, or CHECKPOINT... --into DIR")
    if len({target for _, target in pairs}) != len(pairs):
        raise UserError("two checkpoints have the same name; export them one by one")
    with Progress("export", total=len(pairs)) as progress:
        for checkpoint, target in pairs:
            parity = export_checkpoint(checkpoint, target)
            progress.advance(parity=parity["max_absolute_error"])


if __name__ == "__main__":
    run_command(app, "ckpt_tools")
