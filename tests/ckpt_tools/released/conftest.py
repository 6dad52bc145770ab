"""A hub on this machine that is closed after the test."""

from collections.abc import Callable, Iterator

import pytest

from tests.ckpt_tools.released.fake_hub import FakeHub

Serve = Callable[[dict[str, dict[str, bytes]]], FakeHub]


@pytest.fixture
def serve(monkeypatch) -> Iterator[Serve]:
    """`serve(revisions)`: a hub of these files, which huggingface_hub takes for huggingface.co."""
    started: list[FakeHub] = []

    def start(revisions: dict[str, dict[str, bytes]]) -> FakeHub:
        hub = FakeHub(revisions)
        hub.use(monkeypatch)
        started.append(hub)
        return hub

    yield start
    for hub in started:
        hub.let_go.set()
        hub.shutdown()
        hub.server_close()
