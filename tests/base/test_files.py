"""Files of strangers, modes by the umask, and locks where there are none."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from base.errors import UserError, printable
from base.files import open_to_readers, replaced_file, scratch_directory, take_lock, write_json
from base.reading import read_regular
from tests.waiting import wait_until


def test_a_pipe_or_a_device_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link"):
        with pytest.raises(UserError, match=rf"{name} is not a regular file"):
            read_regular(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none")


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o002, 0o664), (0o022, 0o644)])
def test_modes_follow_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_json(tmp_path / "a.json", {})
        write_json(tmp_path / "private.json", {}, private=True)
        (tmp_path / "closed").touch(mode=0o600)
        open_to_readers(tmp_path / "closed")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"a.json": mode, "private.json": 0o600, "closed": mode}


def test_a_file_that_was_not_finished_leaves_the_one_before(tmp_path):
    write_json(tmp_path / "a.json", {"one": 1})

    def fail() -> None:
        with replaced_file(tmp_path / "a.json") as aside:
            aside.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert json.loads((tmp_path / "a.json").read_text()) == {"one": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_filesystem_without_locks_is_named(tmp_path, monkeypatch, number):
    def refuse(_file, _operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "lock").open("a") as lock, pytest.raises(UserError, match="mounted with") as e:
        take_lock(lock)
    assert str(tmp_path / "lock") in str(e.value)


def test_an_error_at_a_lock_names_its_file(tmp_path, monkeypatch):
    def refuse(_file, _operation):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (tmp_path / "lock").open("a") as lock, pytest.raises(OSError, match="Input") as refused:
        take_lock(lock)
    assert refused.value.filename == str(tmp_path / "lock")


HOLDS = """
import sys, time
from pathlib import Path
from base.files import scratch_directory
with scratch_directory(Path(sys.argv[1])) as directory:
    (directory / "half").touch()
    print("holds", flush=True)
    time.sleep(600)
"""


def test_a_scratch_directory_is_of_one_process_and_its_lock_of_a_regular_file(tmp_path):
    directory = tmp_path / "made"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(directory)], stdout=subprocess.PIPE, cwd=Path.cwd()
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == b"holds\n"
        assert (tmp_path / "made.lock").is_file()
        with (
            pytest.raises(UserError, match="another process is writing"),
            scratch_directory(directory),
        ):
            pass
        assert (directory / "half").exists(), "the other's work is left alone"
        other.kill()
    wait_until(lambda: other.poll() is not None, "the end of the other")
    with scratch_directory(directory) as scratch:
        assert list(scratch.iterdir()) == [], "what the killed process left is gone"
    assert list(tmp_path.iterdir()) == []


def test_no_text_steers_a_terminal():
    assert printable("a\x1b[2Jb\x07\x9b\u202e\n\tc") == "a?[2Jb???\n\tc"
