"""Where MLflow keeps what is mirrored: SQLite below the root, PostgreSQL, or a server; reached in bounded time."""

import fcntl
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from study.layout import MLFLOW_STORE
from train.command import UserError

if TYPE_CHECKING:
    from sqlalchemy import Connection

SQLITE, POSTGRESQL = "sqlite:///", "postgresql+psycopg2://"
KINDS = (SQLITE, POSTGRESQL, "http://", "https://")
# MLflow's defaults block for four minutes where nothing answers; libpq's for two. What is set already is left alone.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "PGCONNECT_TIMEOUT": "10"}
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}
SCHEMA_LOCK = 7_106_213  # PostgreSQL's advisory lock of those who create the schema; any number that all agree on


def store_uri(root: Path) -> str:
    """The tracking URI of the SQLite store that all studies of a root share."""
    return f"{SQLITE}{root.absolute() / MLFLOW_STORE}"


def tracking_uri(root: Path, given: str | None = None) -> str:
    """The URI that is given, else MLFLOW_TRACKING_URI, else that of the root's own store."""
    uri = given or os.environ.get("MLFLOW_TRACKING_URI") or store_uri(root)
    if not uri.startswith(KINDS):
        raise UserError(f"the tracking URI '{masked(uri)}' begins with none of {', '.join(KINDS)}; give one that does")
    return uri


def masked(uri: str) -> str:
    """The URI without its password.

    >>> masked("postgresql+psycopg2://me:secret@db/mlflow")
    'postgresql+psycopg2://me:***@db/mlflow'
    """
    password = urlsplit(uri).password
    return uri.replace(f":{password}@", ":***@") if password else uri


def server_command(root: Path) -> str:
    """The shell command that opens MLflow on the root's own store, on this machine alone and without telemetry."""
    arguments = ["--backend-store-uri", store_uri(root), "--artifacts-destination", str(_artifacts(root))]
    arguments += ["--host", "127.0.0.1", "--port", "5000", "--workers", "1"]
    return f"MLFLOW_DISABLE_TELEMETRY=true {shlex.join([sys.executable, '-m', 'mlflow', 'server', *arguments])}"


def opening(root: Path, uri: str) -> str:
    """What a person does to look at the store."""
    if uri == store_uri(root):
        return f"open it with: {server_command(root)}"
    return f"it is in {masked(uri)}"


def _artifacts(root: Path) -> Path:
    return root.absolute() / "mlartifacts"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock of a file, which its process's end frees, however it ends; other processes wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
        for secret in {password, unquote(password)} if password else ():
            reason = reason.replace(secret, "***")
        raise UserError(
            f"MLflow's store {masked(uri)} failed: {reason:.300}; see that it runs and is reachable, and mirror again"
        ) from None


def _prepare_mlflow() -> None:
    """Has to come before MLflow is imported, which reads the environment then."""
    for name, value in (PATIENCE | QUIET).items():
        os.environ.setdefault(name, value)
    import mlflow  # noqa: F401

    for logger in ("alembic", "mlflow"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # an error is told once, as one line


def _check_schema(connection: "Connection", uri: str) -> str:
    """'current', 'older' or 'empty'; UserError for the schema of an MLflow newer than this one."""
    import mlflow
    from alembic.migration import MigrationContext
    from alembic.script import ScriptDirectory

    revision = MigrationContext.configure(connection).get_current_revision()
    script = ScriptDirectory(str(Path(mlflow.__file__).parent / "store" / "db_migrations"))
    if revision is None:
        return "empty"
    if revision not in {known.revision for known in script.walk_revisions()}:
        raise UserError(
            f"the store {masked(uri)} was made by an MLflow newer than {mlflow.__version__}; install that one here, "
            "or use another store"
        )
    return "current" if revision == script.get_current_head() else "older"


def _upgrade(uri: str) -> None:
    """What `mlflow db upgrade` does, without the URI in the list of processes."""
    from mlflow.db import upgrade

    assert upgrade.callback
    upgrade.callback(url=uri)


@contextmanager
def _connected(uri: str) -> Iterator["Connection"]:
    """A connection that fails at once, where MLflow would try ten times."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool)
    with engine.connect() as connection:
        yield connection


def _sqlite_path(uri: str) -> Path:
    return Path(uri.removeprefix(SQLITE)).absolute()


def _create_sqlite(path: Path) -> None:
    """Aside and renamed: MLflow cannot go on with a schema whose creation was killed half-way."""
    partial = path.with_name(f".{path.name}.partial")
    for leftover in path.parent.glob(f"{partial.name}*"):
        leftover.unlink()
    _upgrade(f"{SQLITE}{partial}")
    os.replace(partial, path)


def create_store(uri: str) -> str:
    """Creates the schema of a store, or brings it up to this MLflow's; returns what was done. May be repeated.

    Raises:
        UserError: for the schema of a newer MLflow, and where nothing answers.
    """
    _prepare_mlflow()
    with _explained(uri):
        if uri.startswith("http"):
            Store(uri, Path()).client.search_experiments(max_results=1)
            return "the server answers, its schema is its own"
        if uri.startswith(SQLITE):
            path = _sqlite_path(uri)
            with locked(path.with_name(f".{path.stem}.lock")):
                if not path.exists():
                    _create_sqlite(path)
                    return "created"
                return _upgraded(uri)
        with _connected(uri) as connection:
            # Held by the connection: a creator that dies lets go.
            connection.exec_driver_sql(f"SELECT pg_advisory_lock({SCHEMA_LOCK})")
            return _upgraded(uri)


def _upgraded(uri: str) -> str:
    with _connected(uri) as connection:
        state = _check_schema(connection, uri)
    if state != "current":
        _upgrade(uri)
    return {"current": "up to date already", "older": "upgraded", "empty": "created"}[state]


class Store:
    """An open store, and which directory its artifacts lie in."""

    def __init__(self, uri: str, root: Path) -> None:
        from mlflow import MlflowClient

        self.uri, self.root = uri, root
        self.client: MlflowClient = MlflowClient(tracking_uri=uri)
        is_server = uri.startswith("http")
        self.artifacts: Path | None = None if is_server else _artifacts(root)  # a server has a place of its own

    @contextmanager
    def writing(self) -> Iterator[None]:
        """SQLite takes one writer at a time: they queue here, as its own waiting starves one of many."""
        if self.uri.startswith(SQLITE):
            path = _sqlite_path(self.uri)
            with locked(path.with_name(f".{path.stem}.lock")):
                yield
        else:
            yield


@contextmanager
def open_store(root: Path, uri: str) -> Iterator[Store]:
    """A store with the schema of this MLflow; inside, failures of the store become UserErrors.

    Raises:
        UserError: where nothing answers, or the schema is missing or another; SQLite's is created where it is missing.
    """
    _prepare_mlflow()
    with _explained(uri):
        if uri.startswith(SQLITE) and not _sqlite_path(uri).exists():
            create_store(uri)
        if not uri.startswith("http"):
            with _connected(uri) as connection:
                state = _check_schema(connection, uri)
            if state != "current":
                what = "has no MLflow schema" if state == "empty" else "has the schema of an older MLflow"
                raise UserError(
                    f"the store {masked(uri)} {what}; run 'python -m study create-store' with its --tracking-uri once"
                )
        yield Store(uri, root)
