"""The version: one, in pyproject.toml, in every command and record, of code from anywhere."""

import json
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from docs.commands import FOLDERS
from tests.lacking import skip
from tests.runs import PROJECT, execute

VERSION = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
LINE = re.compile(
    rf"quantdyn {re.escape(VERSION)} \((commit ([0-9a-f]{{7}})( with uncommitted changes)?, )?"
    rf"Python {platform.python_version()}, torch {re.escape(metadata.version('torch'))},"
    rf" megatron-core {re.escape(metadata.version('megatron-core'))}\)"
)
HEAVY = ("torch", "megatron", "transformers", "deepspeed")
COMMANDS = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({HEAVY}))  # as if they were not installed
sys.argv = ["-m", "--version"]
for folder in {FOLDERS}:
    try:
        runpy.run_module(folder, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0
"""
RECORDED = (
    "import json; from base.environment import environment, version_line;"
    " record = environment();"
    " print(json.dumps([record['quantdyn'], record['commit'], record['uncommitted_changes']]));"
    " print(version_line())"
)


def test_commands_show_versions_without_an_import_of_what_is_slow():
    done = python(PROJECT, COMMANDS)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == len(FOLDERS)
    assert all(LINE.fullmatch(line) for line in lines), done.stdout


def git(directory: Path, *arguments: str) -> str:
    """The output of git in a directory; skips where there is no git."""
    if shutil.which("git") is None:
        skip("there is no git")
    who = ("-c", "user.name=n", "-c", "user.email=e@example.com")
    command = ["git", "-C", str(directory), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def of_checkout(copy: Path) -> tuple[str, str | None, bool | None]:
    """A clone that was changed after its commit."""
    pyproject(copy, "quantdyn", "5.6.7")
    git(copy, "init", "--quiet")
    git(copy, "add", ".")
    git(copy, "commit", "--quiet", "--message", "first")
    with (copy / "base/errors.py").open("a") as file:
        file.write("# changed\n")
    return "5.6.7", git(copy, "rev-parse", "HEAD"), True


def of_archive(copy: Path) -> tuple[str, str | None, bool | None]:
    """Files of an archive, unpacked in the repository of another project."""
    git(copy.parent, "init", "--quiet")
    git(copy.parent, "commit", "--quiet", "--allow-empty", "--message", "another project")
    pyproject(copy, "quantdyn", "5.6.7")
    return "5.6.7", None, None


def of_installer(copy: Path) -> tuple[str, str | None, bool | None]:
    """Files of pip in a repository's .venv, beside the pyproject.toml of another package."""
    of_archive(copy)
    pyproject(copy, "another", "1.0")
    (copy / "quantdyn-5.6.8.dist-info").mkdir()
    (copy / "quantdyn-5.6.8.dist-info/METADATA").write_text("Name: quantdyn\nVersion: 5.6.8\n")
    return "5.6.8", None, None


def pyproject(copy: Path, name: str, version: str) -> None:
    (copy / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "{version}"\n')


@pytest.mark.parametrize("files", [of_checkout, of_archive, of_installer])
def test_version_and_commit_are_those_of_the_code_that_runs(tmp_path, files):
    copy = tmp_path / "place"
    shutil.copytree(PROJECT / "base", copy / "base", ignore=shutil.ignore_patterns("__pycache__"))
    version, commit, changed = files(copy)
    done = python(copy, RECORDED)
    assert done.returncode == 0, done.stderr
    record, line = done.stdout.splitlines()
    assert json.loads(record) == [version, commit, changed]
    shown = f"commit {commit[:7]} with uncommitted changes, " if commit else ""
    assert line.startswith(f"quantdyn {version} ({shown}Python ")


def test_folders_without_their_version_are_refused(tmp_path):
    shutil.copytree(PROJECT / "base", tmp_path / "base")
    done = python(tmp_path, "from base.environment import version; version()")
    last = done.stderr.splitlines()[-1]
    assert "pyproject.toml, which holds the version, is missing; copy it" in last


def python(copy: Path, code: str) -> subprocess.CompletedProcess[str]:
    return execute([sys.executable, "-B", "-c", code], cwd=copy)
