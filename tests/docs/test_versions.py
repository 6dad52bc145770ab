"""One version in all files that state it; the page of versions tested together is that of the lock."""

import re
import tomllib

import pytest
import yaml

from base.libraries import locks
from docs import tested
from docs.generate import REFERENCE
from tests.runs import PROJECT

LOCK = (PROJECT / "requirements.lock").read_text()
ROW = re.compile(r"^\| (\S+) \| (\S+) \| .* \|$", re.MULTILINE)
RUN = """
[[runs]]
lock = "{lock}"
date = {date}
python = "3.12.1"
machine = "two cores"
commands = ["make demo", "make test"]
"""


def test_one_version_is_stated():
    newest = re.search(r"^## (\S+?)(,.*)?$", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((PROJECT / "CITATION.cff").read_text())
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert newest
    assert newest[1] == citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what its schema asks


def test_the_page_has_what_the_lock_has():
    page = (REFERENCE / "tested.md").read_text()
    packages = dict(ROW.findall(page.partition("## Packages")[2].partition("## CUDA")[0]))
    del packages["package"], packages["---"]
    assert {f"{name}=={version}" for name, version in packages.items()} <= set(LOCK.splitlines())
    assert {"torch", "megatron-core", "deepspeed", "transformers", "gptqmodel"} <= packages.keys()


@pytest.fixture
def page_of(monkeypatch, tmp_path):
    """The page for a lock of our own and what was run with it."""
    (tmp_path / "pyproject.toml").write_bytes((PROJECT / "pyproject.toml").read_bytes())
    monkeypatch.setattr(tested, "CHECKOUT", tmp_path)
    monkeypatch.setattr(tested, "RUNS", tmp_path / "runs.toml")

    def page(lock: str, runs: str) -> str:
        (tmp_path / locks.LOCK).write_text(lock)
        (tmp_path / "runs.toml").write_text(runs)
        return tested.tested("note")

    return page


def test_only_runs_of_the_listed_versions_are_stated(page_of):
    digest = re.findall(r"`([0-9a-f]{12})`", page_of(LOCK, ""))[0]
    runs = RUN.format(lock=digest, date="2031-02-03") + RUN.format(lock="0" * 12, date="2030-01-02")
    stated = "| 2031-02-03 | 3.12.1 | two cores | `make demo`, `make test` |"
    assert stated in page_of(LOCK, runs)
    assert stated in page_of(f"# of another day\n{LOCK}", runs)
    assert "2030-01-02" not in page_of(LOCK, runs)
    newer = re.sub(r"^torch==.*$", "torch==99.0", LOCK, flags=re.MULTILINE)
    assert "| torch | 99.0 |" in page_of(newer, runs)
    assert "2031-02-03" not in page_of(newer, runs)
    assert "No run of exactly these versions is recorded yet" in page_of(newer, runs)
