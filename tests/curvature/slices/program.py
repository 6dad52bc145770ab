"""`python -m tests.curvature.slices.program slice`: the command as `python -m curvature` has it."""

import typer

from curvature.slices.command import slice_command
from train.command import run_command

app = typer.Typer(pretty_exceptions_enable=False)
app.callback()(lambda: None)
app.command("slice")(slice_command)

if __name__ == "__main__":
    run_command(app, "curvature")
