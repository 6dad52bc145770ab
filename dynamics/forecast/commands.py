"""The command that forecasts the error after a cooldown of runs that are under way."""

from pathlib import Path
from typing import Annotated

import typer

from base.errors import UserError
from base.names import take_one_of
from study.choosing import Root, StudyName, existing


def forecast(
    name: StudyName,
    root: Root = Path("runs"),
    run: Annotated[
        str | None, typer.Option(help="a run of the study", show_default="all with a stable phase")
    ] = None,
    others: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="STUDY", help="whose cooldowns are learned from too"),
    ] = None,
) -> None:
    """Show what each run would lose by quantization if it were annealed now.

    By the last measured checkpoint of its stable phase, and the cooldowns that other runs ended
    with. It trains and measures nothing.

    Example: python -m study forecast olmo2-30m-lr --run lr3e-3 --from tiny
    """
    from dynamics.forecast.cooldowns import Source
    from dynamics.forecast.page import NO_FORECAST, forecast_lines, forecast_runs
    from study.results.diverged import diverged_runs, left_out_lines

    own = Source.read(*existing(name, root))
    learned = [Source.read(*existing(other, root)) for other in others or ()]
    diverged = diverged_runs(own.directory, own.study)
    runs = [each for each in forecast_runs(own.study) if each.name not in diverged]
    if run is not None:
        names = [each.name for each in own.study.runs]
        if run not in names:
            raise UserError(f"{name} has no run {run}; {take_one_of(run, names)}")
        runs = [each for each in own.study.runs if each.name == run]
    for each in runs:
        typer.echo("\n".join(forecast_lines(own, learned, each)))
    typer.echo("\n".join([NO_FORECAST, *left_out_lines(own.directory, own.study)]))
