"""Two mounts as two nodes: what one knows of the other, and what is left of one that died."""

import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from base.errors import UserError
from base.files import locked, take_lock, write_json
from slurm.submission.record import append, submitting
from tests.faulty_filesystem import Behaviour, Mount, missing, mounted
from tests.lacking import skip
from train.checkpoints import attempt
from train.checkpoints.attempt import Attempt
from train.run.directory import RunDirectory

CACHING = Behaviour(cache_seconds=600)
LEASE_SECONDS = 5.0  # more than a busy machine takes to look at the lock


@pytest.fixture
def shared(tmp_path) -> Path:
    if reason := missing():
        skip(f"no filesystem of the tests here: {reason}")
    return tmp_path


@pytest.fixture
def one_rank(monkeypatch) -> None:
    """As in a training of one process."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr(attempt, "gathered", lambda value: [value])
    monkeypatch.setattr(attempt, "from_rank_zero", lambda value: value)


def begin(path: Path) -> Attempt:
    return Attempt(RunDirectory(path / "run"), "fingerprint", {})


def refusal(held: AbstractContextManager[None]) -> str:
    """Return why a lock is not to be had."""
    with pytest.raises(UserError) as refused, held:
        pass
    return str(refused.value)


def die_within(held: AbstractContextManager[None], mount: Mount) -> None:
    """Kill a mount while its lock is held."""
    with pytest.raises(OSError, match="not connected"), held:  # at the close of the lock's file
        mount.kill()


def test_an_orphan_learns_at_once_of_the_attempt_on_another_node(shared, one_rank, monkeypatch):
    """Though its node keeps names and attributes for ten minutes, and has read the file before."""
    monkeypatch.setenv("QUANTDYN_OWNER", "study:train/0")
    with (
        mounted(shared / "backing", shared / "a", CACHING) as first,
        mounted(shared / "backing", shared / "b", CACHING) as second,
    ):
        orphan = begin(first.path)
        # After every step of a training: the first one reads, what others learn is cached.
        assert [orphan.successor() for _ in range(3)] == [None] * 3
        later = begin(second.path)
        assert (orphan.number, later.number) == (1, 2)
        assert "attempt 2 has begun" in str(orphan.successor())
        assert later.successor() is None
        for each in (orphan, later):
            assert each._lock
            each._lock.close()


def test_a_lock_of_a_dead_node_is_free_after_its_lease(shared):
    """Until then the error says how it is freed by hand, which works."""
    with mounted(shared / "backing", shared / "b") as there:
        with mounted(shared / "backing", shared / "a", None, LEASE_SECONDS) as dead:
            die_within(locked(dead.path / ".lock"), dead)
            assert "node is gone for good, move" in refusal(locked(there.path / ".lock", 0.0))
            with locked(there.path / ".lock", 60.0):
                pass

        with mounted(shared / "backing", shared / "a", None, 600.0) as dead:
            die_within(submitting(dead.path), dead)
            refused = refusal(submitting(there.path, 0.0))
            assert "another command is submitting" in refused
            moved = Path(refused.partition(", move ")[2].removesuffix(" away"))
            moved.rename(moved.with_name("moved"))
            with submitting(there.path, 0.0):
                append(there.path, "retried")


@pytest.mark.parametrize(("locks", "words"), [("none", "cannot be locked"), ("local", None)])
def test_a_site_without_locks_is_told(shared, locks, words):
    """Local ones are no error of a mount: only the doctor, who asks two nodes, sees that."""
    behaviour = Behaviour(locks=locks)
    with (
        mounted(shared / "backing", shared / "a", behaviour) as first,
        mounted(shared / "backing", shared / "b", behaviour) as second,
    ):
        if words:
            assert words in refusal(locked(first.path / ".lock"))
            return
        with locked(first.path / ".lock"), (second.path / ".lock").open("a") as lock:
            assert take_lock(lock), "a broken site: the emulation shows it"


def test_a_mount_that_hangs_is_waited_for(shared):
    with mounted(shared / "backing", shared / "a") as mount:
        mount.hang(1.0)
        writing = threading.Thread(target=write_json, args=(mount.path / "record.json", {}))
        began = time.monotonic()
        writing.start()
        writing.join()
        assert time.monotonic() - began > 0.9
        assert (mount.path / "record.json").read_text() == "{}\n"
