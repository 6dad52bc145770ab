"""python -m ckpt_tools: training checkpoints to HF directories."""

from pathlib import Path
from typing import Annotated

import typer

from train.command import run_command

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def _commands() -> None:
    """Training checkpoints to HF directories."""


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="RUN/checkpoints/stepXXXXXXXX, of any TP, PP and DP")],
    out: Annotated[Path, typer.Argument(help="HF directory to write")],
) -> None:
    """Export a checkpoint to a verified HF directory.

    Example: python -m ckpt_tools export runs/tiny/lr3e-3/checkpoints/step00000400 runs/tiny/lr3e-3/hf/step00000400
    """
    from ckpt_tools.export import export as export_checkpoint

    parity = export_checkpoint(checkpoint, out)
    typer.echo(f"{out}: logits within {parity['max_absolute_error']:.2g} of the training engine's")


if __name__ == "__main__":
    run_command(app, "ckpt_tools")
