"""The stores of MLflow: SQLite below the root, PostgreSQL, or a server; reached in bounded time."""

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

from base.errors import UserError
from base.files import fsync_path, locked, open_to_readers, scratch_directory
from base.reading import read_object
from study.paths import MIRROR_JSON, MLFLOW_STORE

if TYPE_CHECKING:
    from mlflow import MlflowClient

SQLITE, POSTGRESQL = "sqlite:///", "postgresql+psycopg2://"
HTTP = ("http://", "https://")
HOST, PORT = "127.0.0.1", 5000  # of the root's own store
KINDS = (SQLITE, POSTGRESQL, *HTTP)
# MLflow's defaults block for four minutes where nothing answers; libpq's for two. What is set
# already is left alone.
PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "PGCONNECT_TIMEOUT": "10",
}
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


# Of a value of a tag or a parameter: the least limit of any version of MLflow, for a parameter.
MOST_CHARACTERS = 500


def store_uri(root: Path) -> str:
    """Return the tracking URI of the SQLite store that all studies of a root share."""
    return f"{SQLITE}{root.absolute() / MLFLOW_STORE}"


def check_root(root: Path) -> None:
    """Raise UserError if the root's own store has a path that is no part of a URI as it is.

    MLflow reads it escaped in one place and as it is in another.
    """
    path = root.absolute()
    # These have a meaning in a URI.
    for character in "%?":
        if character in str(path):
            raise UserError(
                f"MLflow opens no store below {path}, whose path has '{character}'; take another"
                f" root, or set MLFLOW_TRACKING_URI, such as {SQLITE}/PATH/{MLFLOW_STORE}"
            )


def _file_of(uri: str) -> Path:
    """Return the file of a SQLite store."""
    return Path(uri.removeprefix(SQLITE).partition("?")[0])


def bounded(text: str) -> str:
    """Return a text as short as every version of MLflow takes it.

    >>> len(bounded("gptq-b3 " * 100)) == MOST_CHARACTERS, bounded("gptq-b3")
    (True, 'gptq-b3')
    """
    end = " ... (cut short)"
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - len(end)] + end


def tracking_uri(root: Path) -> str:
    """Return MLFLOW_TRACKING_URI, else the URI of the root's own store."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        check_root(root)
        return store_uri(root)
    if not uri.startswith(KINDS):
        raise UserError(
            f"the tracking URI '{masked(uri)}' begins with none of {', '.join(KINDS)}; give one"
            " that does"
        )
    return uri


def masked(uri: str) -> str:
    """Return the URI without its password.

    >>> masked("postgresql+psycopg2://me:secret@db/mlflow")
    'postgresql+psycopg2://me:***@db/mlflow'
    """
    password = urlsplit(uri).password
    return uri.replace(f":{password}@", ":***@") if password else uri


def server_command(root: Path) -> str:
    """Return the shell command that opens MLflow on the root's own store, on this machine alone."""
    address = f"--host {HOST} --port {PORT}"
    command = f"{shlex.quote(sys.executable)} -m mlflow server {address}"
    places = ["--backend-store-uri", store_uri(root)]
    places += ["--artifacts-destination", str(artifacts_of(root))]
    return f"MLFLOW_DISABLE_TELEMETRY=true {command} --workers 1 {shlex.join(places)}"


def artifacts_of(root: Path) -> Path:
    """Return the directory of the artifacts of all studies of a root."""
    return root.absolute() / "mlartifacts"


def same_place(left: str, right: str) -> bool:
    """Return whether two file:// URIs name the same directory, perhaps by a symbolic link."""
    paths = {Path(unquote(urlsplit(uri).path)).resolve() for uri in (left, right)}
    return len(paths) == 1


def opening(directory: Path, uri: str) -> str:
    """Return what a person does to look at a study in a store, in a line or two."""
    root, mirrored = directory.parent, directory / MIRROR_JSON
    content = read_object(mirrored) if mirrored.exists() else {}
    is_own = uri == store_uri(root)
    if is_own and not _file_of(uri).exists():
        return f"not there yet; make it: python -m study mirror {directory.name} --root {root}"

    lines = [f"open it with: {server_command(root)}" if is_own else f"it is in {masked(uri)}"]
    if is_own:
        lines.append("every user of that machine can read and change it; SECURITY.md has a login")
    server = f"http://{HOST}:{PORT}" if is_own else masked(uri).rstrip("/")
    if server.startswith(HTTP) and content.get("store") == masked(uri):
        page = f"{server}/#/experiments/{content.get('experiment_id')}/runs"
        key = quote(f"metrics.`{content.get('ordered_by')}`", safe="")
        runs = f"{page}?orderByKey={key}&orderByAsc=true"
        lines += [
            f"runs, the smallest error first: {runs}",
            f"charts: {runs}&compareRunsMode=CHART",
            f"errors with intervals, under Description: {page}/{content.get('parent')}",
        ]
    return "\n".join(lines)


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """UserError, one line without a password, where the store cannot be reached or refuses."""
    from mlflow.exceptions import MlflowException
    from requests import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, RequestException, SQLAlchemyError) as error:
        reason = " ".join(str(error).split()).replace(uri, masked(uri))
        password = urlsplit(uri).password
        # Messages of drivers may show the password as it is in the URI or decoded.
        for secret in {password, unquote(password)} if password else ():
            reason = reason.replace(secret, "***")
        raise UserError(
            f"MLflow's store {masked(uri)} failed: {reason:.300}; see that it runs and is"
            " reachable, and mirror again"
        ) from None


def import_mlflow() -> None:
    """Import MLflow in the environment that it reads then."""
    for name, value in (PATIENCE | QUIET).items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401

    for logger in ("alembic", "mlflow"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # an error is one line


def create_store(uri: str) -> None:
    """Let MLflow make the schema of a store where it is missing: once, before jobs that import.

    Raises:
        UserError: where nothing answers, and for the schema of another MLflow.
    """
    with open_store(uri):
        pass


@contextmanager
def turn(uri: str) -> Iterator[None]:
    """Queue for SQLite, which takes one writer: its own waiting starves one of many."""
    if not uri.startswith(SQLITE):
        yield
        return
    path = _file_of(uri).absolute()
    with locked(path.with_name(f".{path.stem}.lock")):
        yield


@contextmanager
def open_store(uri: str) -> Iterator["MlflowClient"]:
    """Yield a client of the store; inside, failures of the store become UserErrors.

    MLflow makes the schema where it is missing, and refuses that of another version.
    """
    import_mlflow()
    from mlflow import MlflowClient

    with _explained(uri):
        if uri.startswith(POSTGRESQL):
            import sqlalchemy

            # fails at once, where MLflow itself would try ten times
            sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool).connect().close()
        with turn(uri):  # one importer makes the schema
            if uri.startswith(SQLITE):
                _make_file(uri)
            client = MlflowClient(tracking_uri=uri)
            client.search_experiments(max_results=1)
        yield client


def _make_file(uri: str) -> None:
    """Let MLflow make the file of a SQLite store where it is missing; its name comes last.

    MLflow makes the schema in some fifty transactions, and refuses one that was left between them.
    """
    from mlflow import MlflowClient

    path = _file_of(uri)
    if path.exists():
        return
    with scratch_directory(path.with_name(f".{path.name}.unfinished")) as directory:
        aside = directory.absolute() / path.name
        MlflowClient(tracking_uri=f"{SQLITE}{aside}").search_experiments(max_results=1)
        open_to_readers(aside)  # SQLite itself makes files that no group may write
        fsync_path(aside)
        # Renamed when it is whole and synced: a kill before leaves no half-made schema.
        aside.rename(path)
        fsync_path(path.parent)
