"""The command that brings a study to MLflow."""

from pathlib import Path
from typing import Annotated

import typer

from base.errors import UserError
from study.choosing import Root, StudyName, existing


def mirror(
    name: StudyName,
    root: Root = Path("runs"),
    run: Annotated[
        str | None, typer.Option(help="import this run's metrics alone, while it trains or after")
    ] = None,
    follow: Annotated[
        float | None,
        typer.Option(
            min=1, help="with --run: again every so many seconds, until the run has ended"
        ),
    ] = None,
) -> None:
    """Bring MLflow up to the table and the runs' metrics; may be repeated and killed.

    It is that of MLFLOW_TRACKING_URI: sqlite:///FILE, postgresql+psycopg2://USER@HOST/DB or
    http(s)://; by default ROOT/mlflow.db. Passwords are read from ~/.pgpass or PGPASSWORD, and from
    ~/.netrc or MLFLOW_TRACKING_USERNAME and _PASSWORD.

    Example: python -m study mirror tiny --root runs

    Example: MLFLOW_TRACKING_URI=http://login:5000 python -m study mirror tiny --run lr3e-3
    --follow 60
    """
    from study.tracking import importer
    from study.tracking.store import opening, tracking_uri

    directory, study = existing(name, root)
    uri = tracking_uri(root)
    if run is None:
        if follow is not None:
            raise UserError("--follow needs --run: give the run that it follows")
        summary = importer.mirror(directory, study, uri)
        typer.echo(
            f"{summary['metrics']} metrics in {len(summary['runs'])} runs,"
            f" {summary['metrics_added']} of them new"
        )
        for of_run, lacking in summary["not_finite"].items():
            typer.echo(f"{of_run}: {lacking}")
    elif follow is not None:
        importer.follow(directory, study, run, uri, follow)
    else:
        typer.echo(f"{importer.mirror_run(directory, study, run, uri)} metrics of {run} were new")
    typer.echo(opening(directory, uri))
