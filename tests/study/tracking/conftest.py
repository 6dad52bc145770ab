"""Real stores: SQLite, PostgreSQL in a cluster of its own, and an MLflow server; read back
without MLflow, by SQL.
"""

import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.interpreter import interpreter
from tests.lacking import skip
from tests.study.tracking.stores import Database
from tests.waiting import HANG_SECONDS, wait_until

POSTGRES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
# a test session that is killed leaves no servers
ENDING_WITH_US = ["setpriv", "--pdeathsig", "INT"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def postgres():
    """A cluster on a free port, without password for anyone on this machine; gives its port."""
    if not POSTGRES:
        skip("PostgreSQL is not installed; apt-get install postgresql")
    # a short path, for its socket, and another user's
    directory = Path(tempfile.mkdtemp(prefix="quantdyn-postgres-"))
    as_other = []
    if os.geteuid() == 0:  # PostgreSQL refuses to be root
        shutil.chown(directory, "postgres")
        as_other = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
    port, programs = free_port(), POSTGRES[-1]
    initdb = [str(programs / "initdb"), f"-D{directory}/data", "-Atrust", "-N", "-Uquantdyn"]
    subprocess.run(
        [*as_other, *initdb], check=True, capture_output=True, timeout=HANG_SECONDS, cwd="/"
    )
    command = [*ENDING_WITH_US, *as_other[1:], str(programs / "postgres"), f"-D{directory}/data"]
    command += [f"-p{port}", f"-k{directory}", "-clisten_addresses=127.0.0.1", "-cfsync=off"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
    )
    # it takes connections before it has started up, and refuses them
    ready = [str(programs / "pg_isready"), "-q", "-h127.0.0.1", f"-p{port}"]
    wait_until(lambda: subprocess.run(ready).returncode == 0, "the server", process)
    yield port
    process.send_signal(signal.SIGINT)  # SIGTERM would wait for MLflow's pools to disconnect
    process.wait(HANG_SECONDS)
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """An MLflow server over a SQLite store: its port and the path of the store."""
    directory, port = tmp_path_factory.mktemp("server"), free_port()
    command = [*ENDING_WITH_US, interpreter(), "-m", "mlflow", "server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--backend-store-uri", f"sqlite:///{directory}/mlflow.db"]
    command += ["--artifacts-destination", str(directory / "artifacts")]
    environment = os.environ | {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--workers", "1"], env=environment, stdout=log, stderr=log, cwd=directory
        )
    wait_until(lambda: answers(port), "the server", process)
    yield port, directory / "mlflow.db"
    process.terminate()
    process.wait(HANG_SECONDS)


@pytest.fixture
def database(request):
    """`database(kind)`: a store of that kind for this test alone; an MLflow server is shared by
    all.
    """

    def database_of(kind: str) -> Database:
        if kind == "server":
            port, path = request.getfixturevalue("server")
            return Database(f"http://127.0.0.1:{port}", f"sqlite:///{path}")
        if kind == "sqlite":
            uri = request.getfixturevalue("store")
            return Database(uri, uri)
        port, name = request.getfixturevalue("postgres"), f"test{time.monotonic_ns()}"
        Database("", f"postgresql+psycopg2://quantdyn@127.0.0.1:{port}/postgres").execute(
            f"CREATE DATABASE {name}"
        )
        uri = f"postgresql+psycopg2://quantdyn@127.0.0.1:{port}/{name}"
        return Database(uri, uri)

    return database_of


@pytest.fixture(scope="session")
def forked():
    """`forked(function, *arguments)`: a child that runs it, started; it has MLflow imported
    already.
    """
    from study.tracking.store import import_mlflow

    import_mlflow()
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    context = multiprocessing.get_context("fork")

    def start(function, *arguments):
        child = context.Process(target=function, args=arguments)
        child.start()
        return child

    return start
