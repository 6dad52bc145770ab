"""The commands that bring a study to MLflow and back."""

from pathlib import Path
from typing import Annotated

import typer

from study.choosing import Profile, Root, Settings, StudyName, Text, TokenizerDirectory, asked_of, existing
from train.command import UserError

TrackingUri = Annotated[
    str | None,
    typer.Option(
        help="MLflow's sqlite:///FILE, postgresql+psycopg2://USER@HOST/DB or http(s)://; default: MLFLOW_TRACKING_URI, "
        "else ROOT/mlflow.db. Passwords: ~/.pgpass or PGPASSWORD; ~/.netrc or MLFLOW_TRACKING_USERNAME and _PASSWORD"
    ),
]


def mirror(
    name: StudyName,
    root: Root = Path("runs"),
    profile: Profile = "full",
    settings: Settings = None,
    text: Text = None,
    tokenizer: TokenizerDirectory = None,
    tracking_uri: TrackingUri = None,
    run: Annotated[str | None, typer.Option(help="import this run's metrics alone, while it trains or after")] = None,
    follow: Annotated[
        float | None, typer.Option(min=1, help="with --run: again every so many seconds, until the run has ended")
    ] = None,
) -> None:
    """Bring MLflow up to table.parquet and the runs' metrics; may be repeated, killed and run twice at any time.

    Example: python -m study mirror tiny --root runs

    Example: python -m study mirror tiny --run lr3e-3 --follow 60 --tracking-uri http://login:5000
    """
    from study.tracking.follow import follow as follow_run
    from study.tracking.importer import mirror as mirror_study
    from study.tracking.importer import mirror_run
    from study.tracking.store import opening
    from study.tracking.store import tracking_uri as uri_of

    directory, study = existing(name, root, profile, settings, asked_of(text, tokenizer))
    uri = uri_of(root, tracking_uri)
    if run is None:
        if follow is not None:
            raise UserError("--follow needs --run: give the run that it follows")
        done = mirror_study(directory, study, uri)
        typer.echo(f"{done['metrics']} metrics in {len(done['runs'])} runs, {done['metrics_added']} of them new")
    elif follow is not None:
        follow_run(directory, study, run, uri, follow)
    else:
        typer.echo(f"{mirror_run(directory, study, run, uri)} metrics of {run} were new")
    typer.echo(opening(root, uri))


def create_store(root: Root = Path("runs"), tracking_uri: TrackingUri = None) -> None:
    """Create the schema of an MLflow store, or bring it up to date: once, before jobs that import start.

    Example: python -m study create-store --tracking-uri postgresql+psycopg2://me@db/mlflow
    """
    from study.tracking.store import create_store as create
    from study.tracking.store import masked
    from study.tracking.store import tracking_uri as uri_of

    uri = uri_of(root, tracking_uri)
    typer.echo(f"{masked(uri)}: {create(uri)}")


def export_mlflow(
    name: StudyName,
    out: Annotated[Path, typer.Option(help="parquet file that takes the table")],
    root: Root = Path("runs"),
    tracking_uri: TrackingUri = None,
) -> None:
    """Write a study's table from what MLflow holds alone; it equals the table.parquet that was mirrored.

    Example: python -m study export-mlflow tiny --out tiny.parquet --tracking-uri http://login:5000
    """
    from study.tracking.export import export_table
    from study.tracking.store import tracking_uri as uri_of

    typer.echo(f"{out}: {export_table(root, uri_of(root, tracking_uri), name, out)} rows")
