"""Progress of downloads, from the lines of pip and uv, and its lines while nothing else is said."""

import time

import pytest

from install import make_venv
from install.download import Download
from install.make_venv import Clock

UV = """Resolved 199 packages in 566ms
Downloading torch (858.3MiB)
Downloading nvidia-cublas (403.5MiB)
Downloading mypy (14.8MiB)
 Downloaded mypy
 Downloaded nvidia-cublas
"""
PIP = """Collecting numpy==2.2.6 (from -r pins.txt (line 1))
  Downloading numpy-2.2.6-cp313-cp313-manylinux_2_17_x86_64.whl.metadata (62 kB)
  Downloading numpy-2.2.6-cp313-cp313-manylinux_2_17_x86_64.whl (16.1 MB)
Collecting torch==2.14.0 (from -r pins.txt (line 2))
  Downloading torch-2.14.0-cp313-cp313-manylinux_2_28_x86_64.whl (0.9 GB)
"""


@pytest.fixture
def fed(tmp_path):
    """A download of about 3 GB that has read some lines."""

    def feed(lines: str) -> Download:
        download = Download(3e9, tmp_path)
        for line in lines.splitlines(keepends=True):
            download.read(line)
        return download

    return feed


def test_uv_downloads_at_once(fed):
    """403.5 + 14.8 MiB are 0.44 GB: 60 s, so 2.56 GB more take 350 s."""
    download = fed(UV)
    assert download.words(60) == "0.44 of about 3.0 GB, about 5:50 left; now torch (900 MB)"
    download.read(" Downloaded torch\n")
    assert not download.underway


def test_pip_downloads_one_after_the_other(fed, tmp_path):
    download = fed(PIP)
    (tmp_path / "pip-unpack-a1").mkdir()
    wheel = tmp_path / "pip-unpack-a1" / "torch-2.14.0-cp313-cp313-manylinux_2_28_x86_64.whl"
    wheel.touch()
    assert download.words(9) == "0.02 of about 3.0 GB; now torch (900 MB)"
    with wheel.open("r+b") as file:
        file.truncate(584_000_000)  # without a byte on the disk
    assert download.words(60) == "0.60 of about 3.0 GB, about 4:00 left; now torch (900 MB)"
    download.read("Installing collected packages: numpy, torch\n")
    assert not download.underway


def test_more_than_was_expected_is_said(fed):
    assert fed("Downloading a (4000MB)\n").words(9) == "0.00 of about 4.0 GB; now a (4,000 MB)"


def test_no_silence_while_nothing_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(make_venv, "QUIET_SECONDS", 0.3)
    with Clock() as clock:
        clock.begin("environment: Python 3.13.1 (python3)")
        time.sleep(1)
        clock.begin("download: 2 packages")
        clock.progress = "Building deepspeed".__str__
        time.sleep(0.6)
    printed = [line[9:] for line in capsys.readouterr().out.splitlines()]
    assert printed[:2] == [
        "environment: Python 3.13.1 (python3)",
        "  environment: .venv has 0 MB",
    ]
    assert printed[-2:] == ["download: 2 packages", "  Building deepspeed"]
