"""Stores that are taken, messages of those that fail, and secrets that are never said."""

import contextlib
import socket
import subprocess

import pytest

from base.errors import UserError
from study.tracking.store import masked, open_store, server_command, store_uri, tracking_uri
from tests.interpreter import interpreter
from tests.runs import error_line, python
from tests.study.tracking.stores import write_small_study
from tests.waiting import wait_until


def test_the_server_listens_here_alone_and_says_nothing_elsewhere(tmp_path):
    command = server_command(tmp_path)
    assert f"sqlite:///{tmp_path}/mlflow.db" in command
    assert "--host 127.0.0.1" in command
    assert command.startswith("MLFLOW_DISABLE_TELEMETRY=true ")


def test_the_uri_is_the_environments_else_the_roots(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(tmp_path) == store_uri(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://login:5000")
    assert tracking_uri(tmp_path) == "http://login:5000"
    for other in ("./mlruns", "postgresql://me:secret@db/x", "databricks"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", other)
        with pytest.raises(UserError, match="begins with none of") as refused:
            tracking_uri(tmp_path)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize("password", ["pa:ss", "p%40ss%2Fword", "a.b*c"])
def test_a_password_is_masked(password):
    uri = f"postgresql+psycopg2://me:{password}@db:5432/mlflow"
    assert masked(uri) == "postgresql+psycopg2://me:***@db:5432/mlflow"


def connections(listener: socket.socket) -> int:
    """Return how many clients have come; take them off the queue."""
    listener.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
            count += 1
    return count


def test_a_store_that_does_not_answer_is_told_of_in_one_line_and_soon(tmp_path, monkeypatch):
    """Nothing listens; and something listens and never answers. The password is in no output and
    no file.

    By itself MLflow asks a server eight times and a database ten times, for minutes.
    """
    write_small_study(tmp_path, "down", 1)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "2")
    with socket.socket() as silent, socket.socket() as closed:
        for listener in (silent, closed):
            listener.bind(("127.0.0.1", 0))
        silent.listen()
        ports = [listener.getsockname()[1] for listener in (silent, closed)]
        closed.close()
        tries = {"http": 2, "postgresql+psycopg2": 1}
        for kind in tries:
            for port in ports:
                uri = f"{kind}://me:s3cr%24t@127.0.0.1:{port}/x"
                monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
                words = ("mirror", "down", "--root", str(tmp_path), "--run", "lr0.001")
                done = python("study", *words)
                assert f"{kind}://me:***@127.0.0.1:{port}" in error_line(done)
                assert "s3cr" not in done.stdout + done.stderr
            assert connections(silent) == tries[kind]
    assert not any(b"s3cr" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_open_store_explains_what_fails_inside(tmp_path):
    with (
        pytest.raises(UserError, match=r"failed: .*No Experiment"),
        open_store(store_uri(tmp_path)) as client,
    ):
        client.get_experiment("77")


def test_an_importer_that_is_killed_in_making_the_schema_leaves_no_store(tmp_path):
    """MLflow refuses a schema that was half made, and would at every later start."""
    store = tmp_path / "mlflow.db"
    making = "from study.tracking.store import create_store; import sys; create_store(sys.argv[1])"
    killed = subprocess.Popen([interpreter(), "-c", making, store_uri(tmp_path)])
    begun = lambda: any(path.stat().st_size for path in tmp_path.rglob("mlflow.db"))  # noqa: E731
    wait_until(begun, "a schema that is begun", killed)
    killed.kill()
    killed.wait()
    assert not store.exists()
    with open_store(store_uri(tmp_path)) as client:
        assert [experiment.name for experiment in client.search_experiments()] == ["Default"]
    assert store.exists()
