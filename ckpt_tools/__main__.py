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
    checkpoints: Annotated[list[Path], typer.Argument(help="RUN/checkpoints/stepXXXXXXXX, of any TP, PP and DP")],
    out: Annotated[Path, typer.Argument(help="HF directory to write; of several checkpoints, what holds theirs")],
) -> None:
    """Export checkpoints to verified HF directories; several go below OUT under their own names, as with cp.

    Example: python -m ckpt_tools export runs/tiny/lr3e-3/checkpoints/step* runs/tiny/lr3e-3/hf
    """
    from ckpt_tools.export import export as export_checkpoint

    targets = [out] if len(checkpoints) == 1 else [out / checkpoint.name for checkpoint in checkpoints]
    if len(set(targets)) != len(targets):
        raise UserError("two checkpoints have the same name; export them one by one")
    with Progress("export", total=len(targets)) as progress:
        for checkpoint, target in zip(checkpoints, targets, strict=True):
            parity = export_checkpoint(checkpoint, target)
            progress.advance(parity=parity["max_absolute_error"])


if __name__ == "__main__":
    run_command(app, "ckpt_tools")
