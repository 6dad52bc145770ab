"""The command that plans a study's size from the noise that another has shown."""

import re
from pathlib import Path
from typing import Annotated

import typer

from base.errors import UserError
from study.choosing import Root, StudyName, existing


def power(
    name: StudyName,
    root: Root = Path("runs"),
    difference: Annotated[
        str, typer.Option(metavar="PERCENT%", help="to be decided, of the figure")
    ] = "10%",
) -> None:
    """Show how many seeds, documents and calibration draws decide a difference, with 80% power.

    By the variances that the study's own comparisons over seeds show.

    Example: python -m study power tiny --difference 5%
    """
    from study.results.paired import Paired
    from study.results.power_table import power_lines
    from study.results.table import read_table

    directory, study = existing(name, root)
    if not re.fullmatch(r"\d*\.?\d+%", difference) or float(difference[:-1]) == 0:
        raise UserError(f"--difference {difference} is not a share above 0; write it as 10%")
    share = float(difference[:-1]) / 100
    rows = read_table(directory, study)
    typer.echo("\n".join(power_lines(study, rows, Paired(directory), share)))
